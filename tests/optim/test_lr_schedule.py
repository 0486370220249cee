"""Learning rates as functions of the update."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.config.optimizer import LrScheduleConfig, WeightDecayScheduleConfig
from pangu.optim.lr_schedule import learning_rate, weight_decay


def schedule(
    shape: str, warmup: int = 10, decay: int | None = None, start: str = "warmup", low: float = 0.1, end: str = "linear"
):
    return LrScheduleConfig(shape, warmup, decay, start, low, end)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
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
    assert learning_rate(schedule("inverse_sqrt"), 1.0, 9999, 40) == pytest.approx(0.5)
    assert learning_rate(schedule("inverse_sqrt"), 1.0, 9999, 4000) == 0.1
    assert learning_rate(schedule("inverse_sqrt", warmup=0, low=0.0), 1.0, 100, 4) == pytest.approx(0.5)


def test_the_decays_of_wsd_are_megatrons() -> None:
    """A quarter, a half and all of the decay of 20 updates to 0.1: 1 - x, half a cosine, 2 x 0.5^x - 1, 1 - sqrt(x)."""
    for shape, remaining in {
        "linear": (0.75, 0.5),
        "cosine": (0.5 + math.sqrt(0.125), 0.5),
        "exponential": (2**0.75 - 1, math.sqrt(2) - 1),
        "minus_sqrt": (0.5, 1 - math.sqrt(0.5)),
    }.items():
        wsd = schedule("wsd", decay=20, end=shape)
        for update, share in zip((79, 80, 85, 90, 100), (1.0, 1.0, *remaining, 0.0), strict=True):
            assert learning_rate(wsd, 1.0, 100, update) == pytest.approx(0.1 + 0.9 * share), (shape, update)


def test_weight_decay_over_the_run_is_megatrons() -> None:
    line, half_cosine = WeightDecayScheduleConfig(0.02, "linear"), WeightDecayScheduleConfig(0.02, "cosine")
    values = [weight_decay(line, 0.1, 100, i) for i in (0, 25, 50, 100, 101)]
    assert values == pytest.approx([0.02, 0.04, 0.06, 0.1, 0.1])
    rise = 0.08 * 0.5 * (1 - math.sqrt(0.5))
    assert [weight_decay(half_cosine, 0.1, 100, i) for i in (0, 25, 50, 100)] == pytest.approx(
        [0.02, 0.02 + rise, 0.06, 0.1]
    )
    assert weight_decay(None, 0.1, 100, 3) == 0.1


@given(
    shape=st.sampled_from(["cosine", "linear", "wsd"]),
    end=st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"]),
    warmup=st.integers(0, 30),
    decay=st.one_of(st.none(), st.integers(30, 70)),
    start=st.sampled_from(["warmup", "start"]),
)
def test_after_the_warm_up_it_never_rises_and_ends_on_the_floor(
    shape: str, warmup: int, decay: int | None, start: str, end: str
) -> None:
    rates = [learning_rate(schedule(shape, warmup, decay, start, end=end), 1.0, 100, i) for i in range(150)]
    after = rates[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert rates[-1] == pytest.approx(0.1)
    assert all(0.1 - 1e-12 <= rate <= 1.0 for rate in after)
