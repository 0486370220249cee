"""Intervals of step times: what they contain, where they are borrowed from, and that the shipped ones are current."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

from benchmarks.planner_accuracy.__main__ import main
from benchmarks.planner_accuracy.intervals import Residual, coverage, intervals_of, residuals_of
from benchmarks.planner_accuracy.measurements import read_rows
from benchmarks.planner_accuracy.published import RULES
from pangu.report.intervals import SHARE, nearest, shipped
from tests.planner_accuracy.test_command import TABLE


def drawn(sources: int, rows: int, device: str = "A100", bias: float = 0.0) -> list[Residual]:
    """Residuals of sources whose errors have the same distribution."""
    draw = Random(0)
    kind = device, "bf16", False
    errors = ((f"{device} {source}", draw.gauss(bias, 0.1)) for source in range(sources) for _ in range(rows))
    return [Residual(source, kind, error, abs(error - bias)) for source, error in errors]


def test_an_interval_contains_its_share_and_sources_count_alike() -> None:
    known, group = drawn(5, 200), "A100 bf16 without pipeline"
    alone = intervals_of(known)[group]
    inside = sum(alone.low <= math.exp(one.error) <= alone.high for one in known)
    assert inside / len(known) == pytest.approx(SHARE, abs=0.01)
    assert sum(alone.median <= math.exp(one.error) for one in known) / len(known) == pytest.approx(0.5, abs=0.03)
    repeated = [one for one in known if one.source == "A100 0"] * 9
    assert intervals_of([*known, *repeated])[group][:3] == pytest.approx(alone[:3], rel=0.01)


def test_unseen_sources_of_the_same_distribution_are_covered() -> None:
    counts = coverage(drawn(8, 300))
    assert len(counts) == 8
    assert all(inside / rows == pytest.approx(SHARE, abs=0.05) for inside, rows in counts.values())


def test_few_sources_borrow_the_interval_of_others() -> None:
    known = [*drawn(RULES.least_sources, 50), *drawn(RULES.least_sources - 1, 50, "V100", bias=1.0)]
    table = intervals_of(known)
    assert nearest(table, "A100", "bf16", False)[0] == "A100 bf16 without pipeline"
    name, borrowed = nearest(table, "V100", "bf16", False)
    assert name == "bf16"
    assert borrowed.high > 2 * table["A100"].high, "it contains the others' rows too"
    assert nearest(table, "ASCEND910", "fp4", True)[0] == "all"


def test_the_benchmark_writes_the_shipped_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    excerpt, written = Path(__file__).parent / "measurements.csv", tmp_path / "intervals.json"
    assert main(["--table", str(excerpt), "--held-out", "--write", str(written)]) == 0
    out = capsys.readouterr().out
    assert "False alarms: 0 of 6 that ran are called too large." in out
    assert "Intervals from other sources contain " in out
    assert json.loads(written.read_text())["intervals"]["all"]["rows"] == 6


@pytest.mark.skipif(not TABLE.exists(), reason="the whole table is not at hand")
def test_the_shipped_intervals_are_those_of_the_table() -> None:
    """To the four digits that are written."""
    found = intervals_of(list(residuals_of(read_rows(TABLE)[0])))
    assert found.keys() == shipped().keys()
    for name, one in found.items():
        assert one == pytest.approx(shipped()[name], rel=1e-3)
