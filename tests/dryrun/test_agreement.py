"""A dry run against the same step carried out: bytes and calls of collectives exactly, memory within 0.1 %."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch

from pangu.dryrun.run import RankReport, audited, carry_out, dry_run, micro_batches, repeated, report_of
from pangu.pipeline.layouts import choose_layout
from tests.dryrun.layouts import values
from tests.spawn import Pool

KERNEL = "model.attention=reference"
"""One that a CPU computes with the same operations for fake tensors."""
SENDING = (
    "parallel.data=2 parallel.zero=1",
    "parallel.data=2 parallel.zero=3 parallel.bucket_mib=0.02",
    "parallel.data=2 optimizer=lamb memory.recompute=full",
    "parallel.context=2 parallel.zero=2 parallel.context_kind=gather",
    "parallel.context=2 parallel.context_kind=ring precision=bf16",
    "parallel.context=2 parallel.context_kind=ulysses parallel.zero=1",
    "parallel.tensor=2",
    "parallel.tensor=2 parallel.sequence=true memory.recompute=selective",
    "parallel.pipeline=2 parallel.schedule=zb_h1",
    "parallel.pipeline=2 parallel.data=2 parallel.zero=2 precision=bf16",
)
ALONE = (
    "",
    "precision=bf16 loss.chunk=8",
    "optimizer=lamb precision=fp16 memory.recompute=full",
    "memory.recompute=selective model.dropout=0.1 model.attention_dropout=0.1",
    "model.positions=rope model.norm=rmsnorm",
)


def carried_out(rank: int, world: int, layout: str) -> RankReport:
    """A real step on a CPU."""
    chosen = choose_layout(values(layout, KERNEL), 1)
    config, layout, stages = chosen
    with audited(chosen, torch.device("cpu")) as (audit, trainer):
        audit.by_action.clear()
        audit.enter(None)
        audit.memory.restart()
        carry_out(audit, trainer, micro_batches(config, layout))
    return report_of(audit, trainer.mesh, stages.schedule.micro_batches, repeated(stages.schedule), {})


def timeless(collectives: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was hidden of messages between stages: when a stage waits depends on the machine's load."""
    counts = deepcopy(dict(collectives))
    for count in counts.get("pipeline", {}).values():
        count.pop("hidden_bytes", None)
    return counts


@pytest.mark.parametrize("layout", SENDING)
def test_collectives_are_those_of_a_real_run(pool: Pool, layout: str) -> None:
    """Processes that send with gloo; products and launches agree as well."""
    chosen = choose_layout(values(layout, KERNEL), 1)
    for rank, real in enumerate(pool.run(chosen.layout.world, carried_out, layout)):
        told = dry_run(chosen, rank, torch.device("cpu"), whole=True)
        assert told.collectives
        assert timeless(told.collectives) == timeless(real.collectives)
        assert (told.launches, told.memory_bound_bytes, told.flops) == (
            real.launches,
            real.memory_bound_bytes,
            real.flops,
        )


@pytest.mark.parametrize("layout", ALONE)
def test_memory_is_that_of_a_real_run(layout: str) -> None:
    """0.1 %; where nothing is sent, so that no thread of gloo holds a buffer for a moment longer."""
    real = carried_out(0, 1, layout)
    told = dry_run(choose_layout(values(layout, KERNEL), 1), 0, torch.device("cpu"), whole=True)
    assert told.peak == pytest.approx(real.peak, rel=1e-3)
    assert told.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-3)
