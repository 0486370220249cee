"""A user's plan of a layout takes as long as in the study: one cost model, with data for each program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.planner_accuracy.accuracy import Fitted, predict
from benchmarks.planner_accuracy.measurements import Row
from benchmarks.planner_accuracy.published import SYSTEMS
from tests.planner_accuracy.test_measurements import row
from tools import plan

HEADER = "recipe layers hidden heads vocab seq gpu gpus tp pp vpp zero sp recompute micro_batch global_batch"
ROWS = """
pangu_2_6b 32 2560 32 40000 1024 Ascend910 512 8 1 1 1 no none 4 512
pangu_13b 40 5120 40 40000 1024 Ascend910 1024 8 4 1 1 no none 2 1024
pangu_200b 64 16384 128 40000 1024 Ascend910 2048 8 16 1 1 no full 1 1024
gpt3_175b 96 12288 96 51200 2048 A100-80G 64 8 8 3 0 no full 1 64
gpt3_175b 96 12288 96 51200 2048 H100-80G 256 4 8 6 1 yes none 1 512
gpt3_13b 40 5120 40 51200 2048 H100-80G 64 1 1 1 3 no none 1 128
"""
"""Layouts that this program can run: of PanGu-α, of Korthikanti et al. 2022, table 5, of dgxc, and with ZeRO-3."""
CASES = [dict(zip(HEADER.split(), line.split(), strict=True)) for line in ROWS.strip().splitlines()]


def read(values: dict[str, str], folder: Path) -> Row:
    """The row of the study's table; a recipe is no column of it."""
    return row(folder, source="pangu-train", **{name: value for name, value in values.items() if name != "recipe"})


def planned(values: dict[str, str], one: Row, capsys: pytest.CaptureFixture[str]) -> float:
    """The step time that tools/plan.py prints."""
    layout, degrees = (
        one.setups[0].plan,
        ("tensor", "pipeline", "virtual_stages", "data", "zero", "schedule", "sequence"),
    )
    words = [f"parallel.{name}={getattr(layout, name)}" for name in degrees]
    words += [f"memory.recompute={layout.recompute}", f"batch.micro_size={layout.micro_size}"]
    words += [f"batch.global_size={values['global_batch']}", f"model.vocab={values['vocab']}"]
    words += [f"cluster={one.cluster.name}", f"cluster.devices={values['gpus']}"]
    assert (
        plan.main([f"+config={values['recipe']}", *words, f"parallel.layers=[{','.join(map(str, layout.layers))}]"])
        == 0
    )
    found = re.search(r"step time (\S+) s", capsys.readouterr().out)
    assert found
    return float(found[1])


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("values", CASES)
def test_a_plan_of_what_a_published_program_does_takes_as_long_as_in_the_study(
    values: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same work of modules, the sums of our program, and messages that it hides: to three digits and 1 %."""
    one = read(values, tmp_path)
    system = SYSTEMS["megatron of 2021"]._replace(gradient_bytes=4, overlapped=True)
    one = one._replace(setups=(one.setups[0]._replace(system=system),))
    assert planned(values, one, capsys) == pytest.approx(predict(one, Fitted()).seconds, rel=0.015)


@pytest.mark.parametrize("values", CASES)
def test_a_plan_takes_as_long_as_the_study_says_of_this_program(
    values: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The few numbers of `systems.yaml` are coarser than what dry runs count, which is 5.5 % of a step at most."""
    one = read(values, tmp_path)
    assert planned(values, one, capsys) == pytest.approx(predict(one, Fitted()).seconds, rel=0.055)
