"""A plan against a dry run of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pangu.pipeline.layouts import choose_layout
from pangu.planning.program import Program, plan_of
from pangu.schedule.stage_ledger import StageLedger
from pangu.topology.layout import Coordinates
from tests.dryrun.conftest import SharedWorker

OFF = 0.02
"""Most by which a planned peak may be off."""


def collectives_of(stage: StageLedger) -> dict[str, dict[str, tuple[float, float]]]:
    """Calls and bytes per step, by axis and kind of collective; a span has the mean bytes of calls, a third of them is
    not exact."""
    total: dict[str, dict[str, tuple[float, float]]] = {}
    for one, often in stage.sent.items():
        calls, nbytes = total.setdefault(one.axis, {}).get(one.kind, (0.0, 0.0))
        often *= one.calls
        total[one.axis][one.kind] = calls + often, nbytes + often * one.bytes
    return {
        axis: {kind: (calls, round(size)) for kind, (calls, size) in kinds.items()} for axis, kinds in total.items()
    }


def assert_planned(values: Mapping[str, Any], process: SharedWorker, name: str = "", off: float = OFF) -> None:
    """Compare of each stage bytes and calls of collectives and the number of process groups exactly, and the peak, up
    to a share `off`. `name`: of the case, for messages."""
    chosen = choose_layout(values, 1)
    program, plan = Program(chosen.config), plan_of(chosen.config, chosen.layout)
    program.prepare([plan])  # all stages in one dry run
    ledger = program.describe(plan)
    for stage, planned in enumerate(ledger.stages):
        report = process.report(values, chosen.layout.rank(Coordinates(stage, 0, 0)))
        carried_out = {
            axis: {kind: (one["calls"], one["bytes"]) for kind, one in kinds.items()}
            for axis, kinds in report["collectives"].items()
        }
        assert collectives_of(planned) == carried_out, (stage, name)
        assert planned.groups == report["groups"], (stage, name)
        assert planned.peak == pytest.approx(report["peak"], rel=off), (stage, name)
