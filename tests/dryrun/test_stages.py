"""Forecast of a run whose batches and sequences grow: each stage as a run of its own."""

from __future__ import annotations

import pytest

from pangu.pipeline.layouts import choose_layout
from pangu.report.forecast import Forecast
from tests.configs import composed

WORDS = (
    *("data=synthetic", "validation.every=0", "model=pangu_quickstart", "model.layers=2", "model.sequence=256"),
    *("precision=bf16", "cluster=h100", "dry_run=true", "batch.micro_size=2", "parallel.data=2", "train.steps=60"),
)
STAGES = "batch.stages=[{until:20,global_size:8,sequence:64},{until:30,global_size:8}]"

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")


def forecast(*words: str) -> Forecast:
    return Forecast.of(*choose_layout(composed(*WORDS, *words), 1))


def test_each_stage_takes_as_long_as_a_run_of_its_batches() -> None:
    staged = forecast("batch.global_size=16", STAGES)
    alone = [forecast("batch.global_size=8", f"model.sequence={sequence}") for sequence in (64, 256)]
    final = forecast("batch.global_size=16")
    assert staged.stages_s == pytest.approx([one.time.total for one in alone], rel=1e-9)
    assert staged.time.total == pytest.approx(final.time.total, rel=1e-9)
    assert staged.memory.total == final.memory.total >= alone[1].memory.total > alone[0].memory.total
    assert staged.begins == 30
    config, _, _ = choose_layout(composed(*WORDS, "batch.global_size=16", STAGES), 1)
    total = 20 * staged.stages_s[0] + 10 * staged.stages_s[1] + 30 * staged.time.total
    assert f"all steps {total:.3g} s" in staged.stages_line(config)
