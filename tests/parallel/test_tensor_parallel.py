"""Tensor and sequence parallelism do not change the maths: every layout equals one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects
from pangu.collectives.regions import TensorRegion, enter, leave
from pangu.data.loader import Loader
from pangu.layers.builder import Builder
from pangu.models.language_model import Options, build_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.test_data_parallel import OVERRIDES, RaggedStream, compare
from tests.spawn import Pool

# (tensor, data, sequence parallel); heads are 12, so that 3 divides them, and the vocabulary of 101 is uneven for all
LAYOUTS = [(2, 1, False), (2, 1, True), (3, 1, False), (4, 1, False), (4, 1, True), (2, 2, False), (2, 2, True)]
SHAPE = ("model.hidden=48", "model.heads=12", "model.ffn=96", "batch.micro_size=4")
FP64 = (*OVERRIDES, *SHAPE, "precision=fp64")


def whole(piece_tensor: Tensor, placement: Any, mesh: Mesh) -> Tensor:
    """The logical tensor put together from the ranks' slices; replicated ones must be equal on all."""
    parts = gather_objects((piece_tensor.clone(), placement.offsets), mesh.group("tensor"))
    if placement.cut_dim is None:
        assert all(torch.equal(part, parts[0][0]) for part, _ in parts), f"{placement.name} differs between ranks"
        return parts[0][0]
    return torch.cat([part for part, _ in sorted(parts, key=lambda entry: entry[1])], placement.cut_dim)


def train(
    rank: int, world: int, tensor: int, sequence: bool, steps: int, kernel: str, *overrides: str
) -> dict[str, Any]:
    """Train a few steps; logical tensors put together from all ranks."""
    torch.manual_seed(rank)
    parallel = f"parallel.sequence={'true' if sequence else 'false'}"
    config = tiny(*overrides, f"parallel.tensor={tensor}", parallel)
    layout = Layout(tensor=tensor, data=world // tensor, sequence=sequence)
    mesh = Mesh.connect(layout, torch.device("cpu"))
    options = Options.of(config, kernel)
    build = Builder(PlacementTable(), region=TensorRegion.of(mesh))
    model, table = build_model(config.model, options, build)
    trainer = Trainer(config, mesh, model, table)

    def collect(of_gradients: bool) -> dict[str, Tensor]:
        return {
            piece.placement.name: whole(piece.master.grad if of_gradients else piece.master, piece.placement, mesh)
            for piece in trainer.pieces
        }

    first = collect(False)
    results, gradients = [], []
    size = config.batch.global_size
    arguments = (config.data.packing, size, config.batch.micro_size, mesh.at.data, mesh.layout.data)
    with Loader(RaggedStream(), *arguments) as loader:
        for step in range(steps):
            results.append(trainer.train_step(loader.micro_batches(size * step)))
            gradients.append(collect(True))
    tokens = torch.arange(32).view(2, 16)
    from pangu.layers.attention import AttentionMask

    with torch.no_grad():
        logits = model.logits(tokens, torch.arange(16).expand(2, -1), AttentionMask(None))
    return {
        "first": first,
        "results": results,
        "gradients": gradients,
        "weights": collect(False),
        "logits": logits,
        "elements": sum(unit.master.numel() for unit in trainer.units),
    }


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_layout_gives_the_same_run_in_float64(pool: Pool, kind: str, optimizer: str) -> None:
    """3 steps with dropout, document resets, ragged loss masks: initial weights bit for bit, losses, norms, every
    gradient and the weights to 1e-12 relative: sums of at most 96 products in another order, 1.1e-16 each."""
    model = ("model.kind=gpt",) if kind == "gpt" else ()
    overrides = (*FP64, *model, f"optimizer={optimizer}")
    one = train(0, 1, 1, False, 3, "reference", *overrides)
    assert len(LAYOUTS) == 7
    for tensor, data, sequence in LAYOUTS:
        if sequence and 16 % tensor:
            continue
        ranks = pool.run(tensor * data, train, tensor, sequence, 3, "reference", *overrides)
        compare(ranks[0], one, 1e-12)
        torch.testing.assert_close(ranks[-1]["logits"], one["logits"], atol=1e-9, rtol=0)
        assert ranks[0]["elements"] < one["elements"] * (1 / tensor + 0.2)


@pytest.mark.parametrize(
    "overrides",
    [
        ("memory.recompute=full",),
        ("memory.recompute=2",),
        ("memory.recompute=selective", "memory.selective=[attention]"),
        ("memory.recompute=selective", "memory.selective=[activation]"),
        ("memory.recompute=selective", "memory.selective=[norm]"),
        ("memory.recompute=selective",),
        ("memory.offload=[activations]",),
        ("memory.offload=[activations]", "memory.recompute=full"),
        ("memory.offload=[activations]", "memory.recompute=selective"),
        ("loss.chunk=5",),
        ("loss.chunk=5", "memory.recompute=full"),
        ("loss.chunk=1000",),
    ],
    ids=",".join,
)
def test_recompute_offload_and_chunked_loss_under_tensor_parallelism(pool: Pool, overrides: tuple[str, ...]) -> None:
    one = one_process()
    compare(train(0, 1, 1, False, 3, "reference", *FP64, *overrides), one, 1e-13)
    for tensor, sequence in [(2, False), (2, True), (4, False), (4, True)]:
        compare(pool.run(tensor, train, tensor, sequence, 3, "reference", *FP64, *overrides)[0], one, 1e-12)


@functools.cache
def one_process() -> dict[str, Any]:
    """The run that all others are compared with."""
    return train(0, 1, 1, False, 3, "reference", *FP64)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_narrow_formats_and_the_fused_kernel(pool: Pool, precision: str, tolerance: float) -> None:
    """fp32: 16 roundings of 6e-8. bf16: roundings of 2^-9 in a loss of 4.6; partial sums are rounded, then added."""
    overrides = (*OVERRIDES, *SHAPE, f"precision={precision}", "model.attention_dropout=0")
    one = train(0, 1, 1, False, 3, "sdpa", *overrides)
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
