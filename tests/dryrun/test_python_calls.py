"""Host time of a small layer, as the number of Python functions that it calls: a bound that a change may only lower."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any
from unittest.mock import patch

from pangu.topology.layout import Layout
from pangu.training import step
from tests.dryrun.test_budgets import FILE
from tests.end_to_end.commands import command
from tests.parallel.harness import small_trainer

OVERRIDES = (
    "precision=bf16",
    "model.attention=sdpa",
    "model.dropout=0",
    "model.attention_dropout=0",
    "batch.micro_size=1",
    "batch.global_size=2",
)
MODES = {"one device": "memory.recompute=none", "recompute full": "memory.recompute=full"}
ROOM = 0.05
"""Share of a bound by which versions of Python and torch may differ."""


def calls_of_step(*overrides: str) -> int:
    """Return the number of Python functions that a step calls, after two others."""
    trainer, batches = small_trainer(Layout(), *OVERRIDES, *overrides)
    for _ in range(2):
        trainer.train_step(batches)
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        trainer.train_step(batches)
    finally:
        sys.setprofile(before)
    return calls


def calls_of_layers() -> dict[str, float]:
    """Return the calls of one more layer for one of two micro-batches, by the products of a GPU, of each mode."""
    with patch.object(step, "layer_products_add", lambda device: True):
        counts = {mode: [calls_of_step(key, f"model.layers={n}") for n in (2, 4)] for mode, key in MODES.items()}
    return {mode: (more - fewer) / 4 for mode, (fewer, more) in counts.items()}


def test_a_layer_calls_no_more_functions_than_it_did() -> None:
    """In a process of its own: a profiler hangs where torch's compiler has taken over the evaluation of frames."""
    done = command("-m", "tests.dryrun.test_python_calls")
    assert done.returncode == 0, done.stderr
    bounds: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))["python calls of a layer and micro-batch"]
    for mode, measured in json.loads(done.stdout.splitlines()[-1]).items():
        advice = f"of {bounds[mode]} in {FILE.name}: host time limits small models on a GPU"
        assert measured <= bounds[mode], f"{mode}: {measured:.0f} Python calls exceed the bound {advice}"
        lower = round(measured / (1 - ROOM))
        assert measured >= bounds[mode] * (1 - 2 * ROOM), (
            f"{mode}: {measured:.0f} calls; write {lower} instead {advice}"
        )


if __name__ == "__main__":
    print(json.dumps(calls_of_layers()))
