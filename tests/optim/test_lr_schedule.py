"""Learning rates as functions of the update."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.config.optimizer import LrScheduleConfig
from pangu.optim.lr_schedule import learning_rate


def schedule(shape: str, warmup: int = 10, decay: int | None = None, start: str = "warmup", low: float = 0.1):
    return LrScheduleConfig(shape, warmup, decay, start, low)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_wastes_no_update_and_reaches_the_peak(shape: str) -> None:
    assert learning_rate(schedule(shape), 1.0, 100, 0) == 0.1
    assert learning_rate(schedule(shape), 1.0, 100, 9) == 1.0
    assert learning_rate(schedule(shape), 1.0, 100, 10) == 1.0
    assert learning_rate(schedule(shape, warmup=0), 1.0, 100, 0) == 1.0


def test_values_by_hand() -> None:
    assert learning_rate(schedule("linear"), 1.0, 110, 60) == pytest.approx(0.55)
    assert learning_rate(schedule("cosine"), 1.0, 110, 60) == pytest.approx(0.55)
    assert learning_rate(schedule("cosine"), 1.0, 110, 35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)))
    assert learning_rate(schedule("constant", low=0.0), 1.0, 100, 99) == 1.0
    # MindSpore's PanGu-α: the cosine is measured from update 0, so it drops a little when the warm-up ends
    assert learning_rate(schedule("cosine", decay=40, start="start"), 1.0, 100, 10) == pytest.approx(
        0.1 + 0.45 * (1 + math.cos(math.pi / 4))
    )
    assert learning_rate(schedule("wsd", decay=20), 1.0, 100, 80) == 1.0
    assert learning_rate(schedule("wsd", decay=20), 1.0, 100, 90) == pytest.approx(0.55)


@given(
    shape=st.sampled_from(["cosine", "linear", "wsd"]),
    warmup=st.integers(0, 30),
    decay=st.one_of(st.none(), st.integers(30, 70)),
    start=st.sampled_from(["warmup", "start"]),
)
def test_after_the_warm_up_it_never_rises_and_ends_on_the_floor(
    shape: str, warmup: int, decay: int | None, start: str
) -> None:
    rates = [learning_rate(schedule(shape, warmup, decay, start), 1.0, 100, i) for i in range(150)]
    after = rates[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert rates[-1] == pytest.approx(0.1)
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in after)
