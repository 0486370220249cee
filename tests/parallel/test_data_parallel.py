"""Replicas, accumulation and micro-batch size do not change the maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.collectives.reduce import gather_objects
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.models.language_model import Options, build_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.spawn import Pool

# (processes, sequences in a micro-batch): all see 8 sequences a step, in 1 to 8 micro-batches
LAYOUTS = [(1, 8), (1, 2), (2, 2), (2, 1), (4, 2), (4, 1)]

# Padding in the tokens makes the number of target tokens differ between micro-batches, dropout makes the masks matter,
# and small buckets make several reductions overlap with backward.
OVERRIDES = (
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.attention=reference",
    "data.packing.eod=3",
    "data.packing.pad=5",
    "data.packing.reset_mask=true",
    "data.packing.reset_positions=true",
    "parallel.bucket_mib=0.02",
    "lr_schedule.warmup_steps=2",
    "optimizer.lr=0.01",
)


class RaggedStream:
    """Random tokens of which a different share of each sample is padding; some end a document."""

    num_samples = None

    def __getitem__(self, index: int) -> Any:
        from pangu.topology.random import generator

        source = generator("ragged", index)
        tokens = source.integers(3, 101, size=17)
        tokens[17 - index % 7 :] = 5
        return tokens


def train(rank: int, world: int, micro_size: int, steps: int, *overrides: str) -> dict[str, Any]:
    """Train a few steps; what this rank saw and holds afterwards."""
    torch.manual_seed(rank)  # nothing may depend on torch's own state
    config = tiny(*OVERRIDES, *overrides, f"batch.micro_size={micro_size}", f"parallel.data={world}")
    mesh = Mesh.connect(Layout(data=world), torch.device("cpu"))
    model, table = build_model(config.model, Options.of(config, "reference"))
    trainer = Trainer(config, mesh, model, table)
    first = {piece.placement.name: piece.master.clone() for piece in trainer.pieces}
    results, gradients = [], []
    stream = RaggedStream()
    with Loader(stream, config.data.packing, config.batch.global_size, micro_size, mesh.at.data, world) as loader:
        for step in range(steps):
            results.append(trainer.train_step(loader.micro_batches(8 * step)))
            gradients.append({piece.placement.name: piece.master.grad.clone() for piece in trainer.pieces})
    weights = {piece.placement.name: piece.master.clone() for piece in trainer.pieces}
    everybody = gather_objects({name: w.double().sum().item() for name, w in weights.items()}, mesh.group("world"))
    assert all(other == everybody[0] for other in everybody), "replicas differ"
    return {"first": first, "results": results, "gradients": gradients, "weights": weights, "units": len(trainer.units)}


def compare(ours: dict[str, Any], one: dict[str, Any], tolerance: float) -> None:
    """Initial weights bit for bit; losses, norms, every gradient of every step and the final weights to rounding."""
    assert all(torch.equal(ours["first"][name], weight) for name, weight in one["first"].items())
    for mine, reference in zip(ours["results"], one["results"], strict=True):
        assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)
    for mine, reference in zip(ours["gradients"], one["gradients"], strict=True):
        for name, gradient in reference.items():
            # a key's bias has gradient 0 in exact arithmetic: the terms that cancel give the scale of rounding
            scale = max(float(gradient.abs().max()), 0.01)
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=100 * tolerance * scale, msg=name)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1000 * tolerance, msg=name)
        assert not torch.equal(weight, one["first"][name]), f"{name} did not move"


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_split_of_the_batch_gives_the_same_run_in_float64(pool: Pool, optimizer: str) -> None:
    """5 steps; 1e-13 relative in the loss: sums of 128 token losses in another order, 1.1e-16 each."""
    overrides = (f"optimizer={optimizer}", "precision=fp64")
    one = train(0, 1, 8, 5, *overrides)
    assert one["units"] > 3
    assert len(LAYOUTS) == 6
    for world, micro_size in LAYOUTS[1:]:
        compare(pool.run(world, train, micro_size, 5, *overrides)[0], one, 1e-13)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_process_accumulating_4_equals_two_accumulating_2_in_fp32(pool: Pool, recompute: str) -> None:
    """5 steps; 1e-6 in the loss (16 roundings of 6e-8) and hence 1e-4 of the largest element in a gradient; weights to
    1e-3 of one unit, because Adam divides small gradients by their own size: compared are the losses of all steps."""
    overrides = (f"memory.recompute={recompute}",)
    one = train(0, 1, 2, 5, *overrides)
    two = pool.run(2, train, 2, 5, *overrides)[0]
    compare(two, one, 1e-6)


def test_recompute_changes_no_bit() -> None:
    kept, again = train(0, 1, 4, 3), train(0, 1, 4, 3, "memory.recompute=full")
    assert all(torch.equal(kept["weights"][name], again["weights"][name]) for name in kept["weights"])


def test_synthetic_tokens_do_not_depend_on_the_replicas(pool: Pool) -> None:
    one = pool.run(1, tokens_seen, 4)[0]
    split = [row for rank in pool.run(2, tokens_seen, 2) for row in rank]
    assert len(one) == 16
    assert sorted(map(tuple, one)) == sorted(map(tuple, split))


def tokens_seen(rank: int, world: int, micro_size: int) -> list[list[int]]:
    config = tiny(f"batch.micro_size={micro_size}")
    sources = open_sources(config.data, config.model, config.train.seed)
    with Loader(sources.train, config.data.packing, 8, micro_size, rank, world) as loader:
        return [row for step in range(2) for batch in loader.micro_batches(8 * step) for row in batch.tokens.tolist()]
