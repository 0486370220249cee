"""Lost processes, and added ones, do not break a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import metrics
from tests.end_to_end.elastic import SAMPLES, SEQUENCE, run
from tests.pace import at_some_pace


@pytest.mark.slow
@at_some_pace
def test_4_processes_become_2_and_then_3(tmp_path: Path, pace: float) -> None:
    """fp64: losses of the same batches to 1e-12; those of other batches differ in the first digits."""
    folder = tmp_path / f"{pace:g}"
    told = run(folder, min_steps := 6, pace)
    assert [phase.processes for phase in told] == [4, 2, 3]
    assert told[0].first_step == 1
    elastic, whole = metrics(folder / "elastic"), metrics(folder / "whole")
    assert len(elastic) > 3 * min_steps
    assert [line["step"] for line in elastic] == list(range(1, len(elastic) + 1))
    assert [line["tokens"] for line in elastic] == [step * SAMPLES * SEQUENCE for step in range(1, len(elastic) + 1)]
    assert [line["loss"] for line in elastic] == pytest.approx([line["loss"] for line in whole], rel=1e-12)
    last = folder / "elastic" / "checkpoints" / f"step-{len(elastic):08d}" / "index.json"
    assert json.loads(last.read_text())["samples"] == SAMPLES * len(elastic)
