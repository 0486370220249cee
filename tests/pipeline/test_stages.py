"""From a configuration to stages, and what is said of one that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from pangu.common.errors import ConfigError
from pangu.config.build import hints_of
from pangu.config.checks import check
from pangu.config.schema import ParallelConfig
from pangu.pipeline.layouts import choose_layout
from pangu.pipeline.stages import plan_stages
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
