"""The first of `parallel.layouts` that goes with the number of processes is taken."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pangu.common.errors import ConfigError
from pangu.pipeline.layouts import choose_layout
from pangu.topology.layout import Layout
from pangu.training.describe import describe
from tests.configs import tiny

ALLOWED = (
    "parallel.layouts=[{tensor:2,pipeline:2,sequence:true},{pipeline:3,schedule:gpipe},{zero:1}]",
    "model.layers=6",
    "batch.global_size=12",
)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (8, Layout(tensor=2, pipeline=2, data=2, sequence=True)),
        (4, Layout(tensor=2, pipeline=2, sequence=True)),
        (3, Layout(pipeline=3)),
        (2, Layout(data=2, zero=1)),
        (1, Layout(zero=1)),
    ],
)
def test_the_first_that_fits(world: int, expected: Layout) -> None:
    config, layout, _ = choose_layout(asdict(tiny(*ALLOWED)), world)
    assert layout == expected
    assert config.parallel.layouts == ()
    assert config.parallel.schedule == ("gpipe" if world == 3 else "1f1b")
    assert (config.parallel.tensor, config.parallel.zero) == (expected.tensor, expected.zero)


def test_without_a_list_the_keys_are_the_layout() -> None:
    config = tiny("parallel.tensor=2")
    assert choose_layout(asdict(config), 4)[:2] == (config, Layout(tensor=2, data=2))


def test_a_schedule_that_does_not_go_with_the_stages_is_passed_over() -> None:
    keys = ("parallel.layouts=[{pipeline:2,virtual_stages:2},{pipeline:2}]", "model.layers=4")
    assert choose_layout(asdict(tiny(*keys)), 2).layout == Layout(pipeline=2)


def test_a_run_that_has_lost_ranks_takes_replicas_that_do_not_divide_the_batch_but_each_gets_a_micro_batch() -> None:
    values = asdict(tiny("batch.global_size=8", "batch.micro_size=2", "batch.stages=[{until:2,global_size:6}]"))
    with pytest.raises(ConfigError, match="must be a multiple of batch"):
        choose_layout(values, 3)
    chosen = choose_layout(values, 3, uneven=True)
    assert (chosen.layout, chosen.stages.schedule.micro_batches) == (Layout(data=3), 2)
    assert "each replica computes at most 2 micro-batches of 2" in describe(chosen.config, chosen.layout, None)
    with pytest.raises(ConfigError, match=r"batch.stages\[0\]: batch.global_size = 6: must be a multiple"):
        choose_layout(values, 4, uneven=True)
    values["batch"] |= {"global_size": 6, "micro_size": 3, "stages": ()}
    rule = (
        "= 6: must be a multiple of batch.micro_size, and at least batch.micro_size x data-parallel size = 3 x 4 = 12"
    )
    with pytest.raises(ConfigError, match=f"{rule}; nearest valid values: 12; or set batch.micro_size to 1$"):
        choose_layout(values, 4, uneven=True)
    values["batch"] |= {"global_size": 13, "micro_size": 3}
    with pytest.raises(
        ConfigError, match=r" = 13: .* = 12; nearest valid values: 12, 15; or set batch.micro_size to 1$"
    ):
        choose_layout(values, 4, uneven=True)
    values["batch"] |= {"global_size": 8, "micro_size": 2}
    values["parallel"]["auto"] = True
    with pytest.raises(ConfigError, match="must be a multiple"):
        choose_layout(values, 3, uneven=True)


def test_what_is_wrong_with_each_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        choose_layout(asdict(tiny("parallel.layouts=[{tensor:3},{pipline:2},{data:3}]")), 5)
    said = str(told.value)
    assert "parallel.layouts[0]: parallel.tensor = 3: must divide model.heads = 4" in said
    assert "parallel.layouts[1].pipline = 2: unknown key; did you mean parallel.layouts[1].pipeline?" in said
    assert "parallel.layouts[2]: parallel.tensor, parallel.pipeline, parallel.data" in said
