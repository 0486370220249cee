"""Host time of a step, as Python functions and operators: bounds that a change may only lower."""

from __future__ import annotations

import json
from typing import Any

from tests.dryrun.host_counts import MODES, Counts
from tests.dryrun.test_budgets import FILE
from tests.end_to_end.commands import command

ROOM = 0.05
"""Share of a bound by which versions of Python and torch may differ; small counts may by `FEW`."""
FEW = 3
GOALS = {"one device": 300, "recompute full": 500}
"""Most Python calls of a layer and micro-batch, forward and backward."""


def counted(*words: str) -> dict[str, Any]:
    """Count in a process of its own: a profiler hangs where torch's compiler evaluates frames."""
    done = command("-m", "tests.dryrun.host_counts", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems(measured: Counts, bounds: Counts) -> list[str]:
    """Counts that exceed their bounds, and bounds that are far too high."""
    assert measured.keys() == bounds.keys()
    return [
        f"{action}: {number:g} {what}, and the bound is {bounds[action][what]:g}"
        for action, counts in measured.items()
        for what, number in counts.items()
        if not -2 <= (number - bounds[action][what]) / max(FEW, ROOM * bounds[action][what]) <= 1
    ]


def test_the_host_does_no_more_for_a_layer_or_an_action_than_it_did() -> None:
    bounds: dict[str, Counts] = json.loads(FILE.read_text(encoding="utf-8"))["host"]
    measured: dict[str, Counts] = {**counted(), "loop": counted("loop")}
    assert set(MODES) | {"loop"} == set(bounds)
    found = [f"{mode}, {problem}" for mode in measured for problem in problems(measured[mode], bounds[mode])]
    assert not found, f"host time limits small models on a GPU: {'; '.join(found)}; see {FILE.name}"
    for mode, most in GOALS.items():
        assert sum(counts["Python calls"] for name, counts in measured[mode].items() if "a layer" in name) <= most
