"""From a configuration to stages, and what is said of one that does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import mul
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import ConfigError
from pangu.config.build import hints_of
from pangu.config.checks import check
from pangu.config.schema import ParallelConfig
from pangu.pipeline.layouts import choose_layout
from pangu.pipeline.stages import deal, plan_stages, shares_of
from pangu.schedule.orders import SCHEDULES, NumbersError, Order, one_f_one_b
from pangu.topology.layout import Layout
from tests.configs import composed, tiny


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("parallel.virtual_stages=2", ["parallel.virtual_stages = 2: 1f1b needs exactly 1 chunk per stage; use 1"]),
        (
            "parallel.schedule=interleaved",
            ["parallel.virtual_stages = 1: interleaved needs at least 2 chunks per stage; use 2"],
        ),
        ("parallel.schedule=zb_v", ["parallel.virtual_stages = 1: zb_v needs exactly 2 chunks per stage; use 2"]),
        (
            "parallel.layers=[1,2]",
            ["parallel.layers = [1, 2]: must add up to the model's 5 layers, not 3; use null"],
        ),
        ("parallel.layers=[5]", ["parallel.layers = [5]: must be 2 numbers, one for each chunk; use null"]),
        (
            "parallel.schedule=zb_v parallel.virtual_stages=3 model.layers=6",
            ["parallel.virtual_stages = 3: zb_v needs exactly 2 chunks per stage; use 2"],
        ),
        (
            "parallel.schedule=zb_v parallel.layers=[5]",
            [
                "parallel.virtual_stages = 1: zb_v needs exactly 2 chunks per stage; use 2",
                "parallel.layers = [5]: must be 2 numbers, one for each chunk; use null",
            ],
        ),
    ],
)
def test_all_problems_at_once_in_the_words_of_the_keys(overrides: str, expected: list[str]) -> None:
    config = tiny("model.layers=5", "parallel.pipeline=2", *overrides.split())
    check(config, world=2)
    with pytest.raises(ConfigError) as told:
        plan_stages(config, Layout(pipeline=2, virtual_stages=config.parallel.virtual_stages))
    assert [str(problem) for problem in told.value.problems] == expected


def test_numbers_that_a_registered_schedule_refuses_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a stage that begins later."""

    def even(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        if micro_batches % 2:
            raise NumbersError(f"{micro_batches} micro-batches", "must be even; use another batch.global_size")
        return one_f_one_b(stages, virtual_stages, micro_batches)

    monkeypatch.setitem(SCHEDULES, "1f1b", replace(SCHEDULES["1f1b"], order=even))
    words = ("model=gpt2_124m", "data=synthetic", "validation.every=0", "parallel.pipeline=2", "batch.micro_size=1")
    rule = "parallel.schedule = 1f1b: 3 micro-batches: must be even; use another batch.global_size"
    for size, start in (("batch.global_size=3", ""), ("batch.stages=[{until:5,global_size:3}]", "batch.stages[0]: ")):
        with pytest.raises(ConfigError) as caught:
            choose_layout(composed(*words, "batch.global_size=4", size), 2)
        assert [str(problem) for problem in caught.value.problems] == [start + rule]


def test_the_configuration_knows_every_schedule() -> None:
    assert set(get_args(hints_of(ParallelConfig)["schedule"])) == set(SCHEDULES)


def test_the_head_counts_as_much_as_it_costs() -> None:
    """With a vocabulary of 101 and 16 columns the head is less than a layer; with 10,000 it is many."""

    def layers(*overrides: str) -> list[int]:
        stages = plan_stages(tiny("model.layers=8", "parallel.pipeline=2", *overrides), Layout(pipeline=2))
        return [len(part.layers) for part in stages.parts]

    assert layers() == [4, 4]
    assert layers("model.vocab=10000") == [7, 1]
    assert layers("parallel.layers=[2,6]") == [2, 6]


@given(slowness=st.lists(st.sampled_from((1.0, 1.3, 2.0, 3.5)), min_size=1, max_size=4), more=st.integers(0, 6))
def test_no_other_division_of_micro_batches_ends_earlier(slowness: list[float], more: int) -> None:
    total = len(slowness) + more
    for unit in (1, 2):
        shares = deal(unit * total, slowness, unit)
        others = (o for o in product(range(1, total + 1), repeat=len(slowness)) if sum(o) == total)
        ends = max(map(mul, shares, slowness))
        assert ends == unit * min(max(map(mul, other, slowness)) for other in others)
        assert sum(shares) == unit * total
        assert all(share % unit == 0 for share in shares)


@pytest.mark.parametrize(
    ("words", "layout", "slowness", "shares"),
    [
        ((), Layout(data=2), (1.0, 1.0), ()),
        ((), Layout(data=2), (1.0, 3.0), (6, 2)),
        ((), Layout(data=2), (1.0, 1.2), ()),
        (("batch.global_size=7",), Layout(data=2), (1.0, 3.0), (6, 1)),
        (("batch.global_size=10",), Layout(1, 4, 4, virtual_stages=2), (1.0, 1.0, 1.0, 3.0), (3, 3, 3, 1)),
        (("batch.global_size=24",), Layout(1, 4, 3, virtual_stages=2), (1.0, 3.0, 1.5), (12, 4, 8)),
        # 12 micro-batches are three groups of 4, and 7 are one: it would keep 14 activations instead of 11
        (("batch.global_size=24",), Layout(1, 4, 3, virtual_stages=2), (1.0, 1.7, 2.4), ()),
    ],
)
def test_shares_differ_where_that_saves_time(
    words: tuple[str, ...], layout: Layout, slowness: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    schedule = "interleaved" if layout.pipeline > 1 else "1f1b"
    config = tiny("model.layers=8", "batch.micro_size=1", f"parallel.schedule={schedule}", *words)
    assert shares_of(config, layout, slowness) == shares


def test_shares_are_equal_where_a_registered_schedule_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_six(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        if micro_batches == 6:
            raise NumbersError("6 micro-batches", "must not be 6")
        return one_f_one_b(stages, virtual_stages, micro_batches)

    config = tiny("model.layers=8", "batch.micro_size=1")
    assert shares_of(config, Layout(data=2), (1.0, 3.0)) == (6, 2)
    monkeypatch.setitem(SCHEDULES, "1f1b", replace(SCHEDULES["1f1b"], order=not_six))
    assert shares_of(config, Layout(data=2), (1.0, 3.0)) == ()
