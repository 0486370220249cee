"""A plan against a dry run of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pangu.pipeline.layouts import choose_layout
from pangu.planning.forecast import plan_of
from pangu.planning.program import Program
from pangu.topology.layout import Coordinates
from tests.dryrun.conftest import SharedWorker

OFF = 0.02
"""Most by which a planned peak may be off."""


def assert_planned(values: Mapping[str, Any], process: SharedWorker) -> None:
    """Of each stage: bytes and calls of collectives exactly, and the peak."""
    chosen = choose_layout(values, 1)
    ledger = Program(chosen.config).describe(plan_of(*chosen))
    for stage, planned in enumerate(ledger.stages):
        report = process.report(values, chosen.layout.rank(Coordinates(stage, 0, 0)))
        carried_out = {
            axis: {kind: (one["calls"], one["bytes"]) for kind, one in kinds.items()}
            for axis, kinds in report["collectives"].items()
        }
        assert planned.collectives == carried_out, stage
        assert planned.peak == pytest.approx(report["peak"], rel=OFF), stage
