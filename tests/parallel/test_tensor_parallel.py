"""Tensor and sequence parallelism do not change the maths: every layout equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.collectives.regions import TensorRegion, enter, leave
from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.spawn import Pool

# (tensor, data, sequence parallel); heads are 12, so that 3 divides them, and the vocabulary of 101 is uneven for all
LAYOUTS = [(2, 1, False), (2, 1, True), (3, 1, False), (4, 1, False), (4, 1, True), (2, 2, False), (2, 2, True)]
SHAPE = ("model.hidden=48", "model.heads=12", "model.ffn=96", "batch.micro_size=4")
FP64 = (*OVERRIDES, *SHAPE, "precision=fp64")


def train(
    rank: int, world: int, tensor: int, sequence: bool, steps: int, kernel: str, *overrides: str
) -> dict[str, Any]:
    """Train a few steps; logical tensors put together from all ranks."""
    layout = Layout(tensor=tensor, data=world // tensor, sequence=sequence)
    return train_layout(rank, world, layout, steps, f"model.attention={kernel}", *overrides)


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_layout_gives_the_same_run_in_float64(pool: Pool, kind: str, optimizer: str) -> None:
    """3 steps with dropout, document resets, ragged loss masks: initial weights bit for bit, losses, norms, every
    gradient and the weights to 1e-12 relative: sums of at most 96 products in another order, 1.1e-16 each."""
    model = ("model.kind=gpt",) if kind == "gpt" else ()
    overrides = (*FP64, *model, f"optimizer={optimizer}")
    one = one_process(3, *overrides)
    assert len(LAYOUTS) == 7
    for tensor, data, sequence in LAYOUTS:
        if sequence and 16 % tensor:
            continue
        ranks = pool.run(tensor * data, train, tensor, sequence, 3, "reference", *overrides)
        compare(ranks[0], one, 1e-12)
        assert ranks[0]["elements"] < one["elements"] * (1 / tensor + 0.2)


@pytest.mark.parametrize(
    ("sequence", "overrides"),
    [
        (False, ("memory.recompute=full",)),
        (True, ("memory.recompute=2",)),
        (False, ("memory.recompute=selective", "memory.selective=[attention]")),
        (False, ("memory.recompute=selective", "memory.selective=[activation]")),
        (False, ("memory.recompute=selective", "memory.selective=[norm]")),
        (True, ("memory.recompute=selective",)),
        (True, ("memory.offload=[activations]",)),
        (True, ("memory.offload=[activations]", "memory.recompute=full")),
        (False, ("memory.offload=[activations]", "memory.recompute=selective")),
        (True, ("loss.chunk=5",)),
        (False, ("loss.chunk=5", "memory.recompute=full")),
        (True, ("loss.chunk=1000",)),
    ],
    ids=str,
)
def test_recompute_offload_and_chunked_loss_under_tensor_parallelism(
    pool: Pool, sequence: bool, overrides: tuple[str, ...]
) -> None:
    """On 2 ranks with or without sequence parallelism, and on 4 ranks the other way round."""
    one = one_process(2, *FP64)
    compare(train(0, 1, 1, False, 2, "reference", *FP64, *overrides), one, 1e-13)
    for layout in ((2, sequence), (4, not sequence)):
        compare(pool.run(layout[0], train, *layout, 2, "reference", *FP64, *overrides)[0], one, 1e-12)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_products_in_chunks_give_the_same_run_in_float64(pool: Pool, kind: str, recompute: str) -> None:
    """3 chunks of 16, 8 or 4 positions, and the loss in chunks too; 2 ranks with and without sequence parallelism, 4
    with one of them. Against one process as tight as without chunks. Two ranks give the very bits of uncut
    products: rows of a product are independent, and a + b = b + a; more ranks sum in an order that depends on the place
    in the message."""
    model = ("model.kind=gpt",) if kind == "gpt" else ()
    overrides = (*FP64, *model, f"memory.recompute={recompute}", "loss.chunk=5")
    one = one_process(3, *overrides)
    for tensor, sequence in ((2, False), (2, True), (4, recompute == "none")):
        arguments = (train, tensor, sequence, 3, "reference", *overrides)
        cut = pool.run(tensor, *arguments, "parallel.overlap_chunks=3")[0]
        compare(cut, one, 1e-12)
        if tensor == 2:
            uncut = pool.run(tensor, *arguments)[0]
            assert all(torch.equal(cut["weights"][name], weight) for name, weight in uncut["weights"].items())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_narrow_formats_and_the_fused_kernel(pool: Pool, precision: str, tolerance: float) -> None:
    """fp32: 16 roundings of 6e-8. bf16: roundings of 2^-9 in a loss of 4.6; partial sums are rounded, then added."""
    overrides = (*OVERRIDES, *SHAPE, f"precision={precision}", "model.attention_dropout=0")
    one = one_process(3, *overrides, "model.attention=sdpa")
    for sequence in (False, True):
        ranks = pool.run(2, train, 2, sequence, 3, "sdpa", *overrides)
        for mine, reference in zip(ranks[0]["results"], one["results"], strict=True):
            assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
            assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)


def conjugates(rank: int, world: int, sequence: bool) -> None:
    """<f(x), y> = <x, fᵀ(y)>: backward is the adjoint of forward, for what enters and what leaves a region."""
    import torch.distributed as dist

    region = TensorRegion(rank, world, dist.group.WORLD, sequence)
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
def test_backward_is_the_adjoint_of_forward(pool: Pool, world: int, sequence: bool) -> None:
    pool.run(world, conjugates, sequence)
