"""Ranks that are threads compute what processes compute on gloo, bit for bit; and NCCL's branch works on gloo too.

Every schedule, every stage of ZeRO and every kind of collective is here once, so that the comparisons of
`test_layouts.py`, which run on threads, hold for processes.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from pangu.topology import mesh
from pangu.topology.layout import Layout
from tests.parallel.cases import CHUNKS
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.spawn import Pool
from tests.threads import Ranks

MODEL = (*OVERRIDES, "model.hidden=16", "model.heads=4", "model.layers=5")
CASES = [
    # groups of two ranks everywhere: of more, gloo adds in an order of its own
    (Layout(tensor=2), "1f1b", "fp32", "parallel.overlap_chunks=3 optimizer=lamb"),
    (Layout(tensor=2, sequence=True), "1f1b", "bf16", "memory.recompute=full parallel.overlap_chunks=3"),
    (Layout(data=2), "1f1b", "bf16", "precision.reduce=bf16"),
    (Layout(data=2, zero=1), "1f1b", "fp16", "optimizer=lamb precision.loss_scale.initial=256"),
    (Layout(data=2, zero=2), "1f1b", "bf16", "memory.offload=[optimizer]"),
    (Layout(data=2, zero=3), "1f1b", "fp32", "train.frozen=[layers.1.*]"),
    (Layout(data=4, zero=3, zero_group=2), "1f1b", "fp32", "parallel.overlap=false"),
    (Layout(tensor=2, data=2, zero=2, sequence=True), "1f1b", "fp32", "optimizer=lamb"),
    *((Layout(pipeline=2, virtual_stages=CHUNKS[name]), name, "fp32", "model.residual_scores=true") for name in CHUNKS),
    (Layout(pipeline=2, tensor=2, virtual_stages=2), "zb_v", "bf16", "loss.chunk=5"),
    (Layout(pipeline=2, data=2, zero=3, virtual_stages=2), "breadth_first", "bf16", "model.tied_head=false"),
]


@pytest.mark.parametrize(("layout", "schedule", "precision", "more"), CASES, ids=str)
def test_threads_and_processes_give_the_same_bits(
    pool: Pool, ranks: Ranks, layout: Layout, schedule: str, precision: str, more: str
) -> None:
    """Losses, norms, every gradient, weights, held-out loss and cached logits of two steps."""
    overrides = (*MODEL, f"precision={precision}", f"parallel.schedule={schedule}", *more.split())
    threads = ranks.run(layout.world, train_layout, layout, 2, *overrides)[0]
    processes = pool.run(layout.world, train_layout, layout, 2, *overrides)[0]
    assert threads["results"] == processes["results"]
    assert threads["validation"] == processes["validation"]
    assert torch.equal(threads["logits"], processes["logits"])
    for mine, other in zip(threads["gradients"], processes["gradients"], strict=True):
        assert [name for name, gradient in other.items() if not torch.equal(mine[name], gradient)] == []
    assert [name for name, w in processes["weights"].items() if not torch.equal(threads["weights"][name], w)] == []


def without_exchanges(rank: int, world: int, layout: Layout, *arguments: Any) -> dict[str, Any]:
    """`train_layout` with the collectives that NCCL has."""
    with patch.object(mesh, "exchanges", lambda device: False):
        return train_layout(rank, world, layout, *arguments)


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, sequence=True), Layout(data=4, zero=2, zero_group=2), Layout(pipeline=2, data=2, zero=3)],
    ids=str,
)
def test_the_branch_of_nccl_gives_the_same_run_on_gloo(pool: Pool, layout: Layout) -> None:
    """fp64, 1e-12: gather and reduce-scatter of torch instead of exchanged parts."""
    overrides = (*MODEL, "precision=fp64", "optimizer=lamb", "batch.micro_size=1")
    ours = pool.run(layout.world, without_exchanges, layout, 2, *overrides)[0]
    compare(ours, one_process(2, *overrides), 1e-12)


def one_fails(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    torch.distributed.barrier()


def test_a_rank_that_fails_holds_nobody_up(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="on purpose"):
        ranks.run(2, one_fails)
