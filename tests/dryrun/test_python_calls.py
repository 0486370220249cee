"""Host time of a small layer, as the number of Python functions that it calls: a bound that a change may only lower."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest

from pangu.topology.layout import Layout
from pangu.training import step
from tests.dryrun.test_budgets import FILE
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


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_calls_no_more_functions_than_it_did(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more layer, for one of two micro-batches, by the products of a GPU."""
    monkeypatch.setattr(step, "layer_products_add", lambda device: True)
    fewer, more = (calls_of_step(MODES[mode], f"model.layers={n}") for n in (2, 4))
    measured = (more - fewer) / 4
    bounds: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))["python calls of a layer and micro-batch"]
    advice = f"of {bounds[mode]} in {FILE.name}: host time limits small models on a GPU"
    assert measured <= bounds[mode], f"{mode}: {measured:.0f} Python calls exceed the bound {advice}"
    lower = round(measured / (1 - ROOM))
    assert measured >= bounds[mode] * (1 - 2 * ROOM), f"{mode}: {measured:.0f} calls; write {lower} instead {advice}"
