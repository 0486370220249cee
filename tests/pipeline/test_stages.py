"""From a configuration to stages, and what is said of one that does not fit."""

from __future__ import annotations

from typing import get_args

import pytest

from pangu.common.errors import ConfigError
from pangu.config.build import hints_of
from pangu.config.checks import check
from pangu.config.schema import ParallelConfig
from pangu.pipeline.stages import plan_stages
from pangu.schedule.orders import SCHEDULES
from pangu.topology.layout import Layout
from tests.configs import tiny


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
