"""Tensor and sequence parallelism bit for bit and in narrow formats; `test_layouts.py` compares them in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.collectives.regions import TensorRegion, enter, leave
from pangu.topology.layout import Layout
from pangu.topology.recorder import AxisGroup
from tests.parallel.harness import OVERRIDES, one_process, train_layout
from tests.threads import Ranks

SHAPE = ("model.hidden=48", "model.heads=12", "model.ffn=96", "batch.micro_size=4")
FP64 = (*OVERRIDES, *SHAPE, "precision=fp64")


def train(
    rank: int, world: int, tensor: int, sequence: bool, steps: int, kernel: str, *overrides: str
) -> dict[str, Any]:
    """Train a few steps; logical tensors put together from all ranks."""
    layout = Layout(tensor=tensor, data=world // tensor, sequence=sequence)
    return train_layout(rank, world, layout, steps, f"model.attention={kernel}", *overrides)


@pytest.mark.parametrize(("kind", "recompute", "sequence"), [("pangu", "none", True), ("gpt", "full", False)])
def test_two_ranks_give_the_bits_of_uncut_products(ranks: Ranks, kind: str, recompute: str, sequence: bool) -> None:
    """3 chunks of 16 or 8 positions: rows of a product are independent, and a + b = b + a; more ranks sum in an order
    that depends on the place in the message."""
    overrides = (*FP64, f"model.kind={kind}", f"memory.recompute={recompute}", "loss.chunk=5")
    cut, uncut = (
        ranks.run(2, train, 2, sequence, 2, "reference", *overrides, f"parallel.overlap_chunks={chunks}")[0]
        for chunks in (3, 1)
    )
    assert all(torch.equal(cut["weights"][name], weight) for name, weight in uncut["weights"].items())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_narrow_formats_and_the_fused_kernel(ranks: Ranks, precision: str, tolerance: float) -> None:
    """fp32: 16 roundings of 6e-8. bf16: roundings of 2^-9 in a loss of 4.6; partial sums are rounded, then added."""
    overrides = (*OVERRIDES, *SHAPE, f"precision={precision}", "model.attention_dropout=0")
    one = one_process(3, *overrides, "model.attention=sdpa")
    for sequence in (False, True):
        ours = ranks.run(2, train, 2, sequence, 3, "sdpa", *overrides)
        for mine, reference in zip(ours[0]["results"], one["results"], strict=True):
            assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
            assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)


def conjugates(rank: int, world: int, sequence: bool) -> None:
    """<f(x), y> = <x, fᵀ(y)>: backward is the adjoint of forward, for what enters and what leaves a region."""
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    region = TensorRegion(rank, world, sequence, AxisGroup(dist.group.WORLD, "tensor"))
    source = torch.Generator().manual_seed(rank)
    rows = 4
    local = torch.randn(rows if sequence else rows * world, 3, dtype=torch.float64, generator=source)
    full = torch.randn(rows * world, 3, dtype=torch.float64, generator=source)
    if not sequence:  # what every rank holds whole is the same on all
        dist.broadcast(local, 0)
    for function, x, y in ((enter, local, full), (leave, full, local)):
        x = x.clone().requires_grad_()
        result = function(x, region)
        result.backward(y)
        assert x.grad is not None
        sides = torch.stack([(result.detach() * y).sum(), (x.detach() * x.grad).sum()])
        counts = torch.ones(2, dtype=torch.float64)
        if not sequence:
            # a replicated tensor counts once, one that differs by rank counts on every rank
            counts = torch.tensor([1.0, 1 / world] if function is enter else [1 / world, 1.0], dtype=torch.float64)
        sides *= counts
        dist.all_reduce(sides)
        torch.testing.assert_close(sides[0], sides[1])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_backward_is_the_adjoint_of_forward(ranks: Ranks, world: int, sequence: bool) -> None:
    ranks.run(world, conjugates, sequence)
