"""Trains small models on any layout and compares every number of the run with one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce, gather_objects
from pangu.config.data import PackingConfig
from pangu.config.schema import RunConfig
from pangu.config.stages import num_samples
from pangu.data.batch import Batch, Row, batch_of
from pangu.data.loader import Loader
from pangu.data.stream import Stream
from pangu.evaluation.generation import Reader
from pangu.evaluation.inference import LoadedModel, mean_loss
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.stages import BatchStages
from pangu.training.step import Trainer
from pangu.zero.flat_parameter import Shard
from tests.configs import tiny

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
    "parallel.bucket_mib=0.01",
    "lr_schedule.warmup_steps=2",
    "optimizer.lr=0.01",
)


BF16 = torch.bfloat16  # which numpy does not know


class RaggedStream(Stream):
    """Random tokens of which a different share of each sample is padding; some end a document."""

    num_samples = None

    def __getitem__(self, index: int) -> Any:
        from pangu.topology.random import generator

        source = generator("ragged", index)
        tokens = source.integers(3, 101, size=17)
        tokens[17 - index % 7 :] = 5
        return tokens


class PackedRows(RaggedStream):
    """The same tokens as two documents in each row, with padding behind them, as `data.packing.method=best_fit` packs
    them; some tokens do not count in the loss."""

    def __getitem__(self, index: int) -> Row:
        tokens = super().__getitem__(index)
        inputs, labels = tokens[:-1], tokens[1:]
        places = np.arange(len(inputs))
        stop = len(inputs) - index % 5
        begins = np.isin(places, (0, 3 + index % 4, stop))
        return Row(inputs, labels, (places < stop) & (labels % 7 > 0), begins, places >= stop)


def samples_of(packing: PackingConfig) -> Stream:
    """Return rows of whole documents if documents end and no id is padding, otherwise tokens cut from all documents."""
    return PackedRows() if packing.pad is None and packing.eod is not None else RaggedStream()


def parallel_keys(layout: Layout) -> tuple[str, ...]:
    """The keys that ask for a layout."""
    sequence = "true" if layout.sequence else "false"
    return (
        f"parallel.tensor={layout.tensor}",
        f"parallel.pipeline={layout.pipeline}",
        f"parallel.virtual_stages={layout.virtual_stages}",
        f"parallel.data={layout.data}",
        f"parallel.context={layout.context}",
        f"parallel.sequence={sequence}",
        f"parallel.zero={layout.zero}",
        f"parallel.zero_group={layout.zero_group or 'null'}",
        f"parallel.expert={layout.expert}",
        f"parallel.expert_tensor={layout.expert_tensor or 'null'}",
    )


def rectangles(shards: list[Shard], values: Mapping[str, Tensor]) -> list[tuple[str, Any, Any, Tensor | np.ndarray]]:
    """Name, global shape, global offsets and values of everything that a rank holds. As arrays where there is such a
    format: pickling many small tensors takes longer than the steps that made them."""
    return [
        (shard.placement.name, shard.placement.shape, offsets, part.clone() if part.dtype == BF16 else part.numpy())
        for shard in shards
        for part, offsets in shard.rectangles(values[shard.placement.name])
    ]


def whole(trainer: Trainer, of_gradients: bool, on_all_ranks: bool = True) -> dict[str, Tensor]:
    """Every logical tensor put together from all ranks, on all of them or on the first one, where the others get
    nothing; what several ranks hold must be equal on all of them."""
    shards = trainer.parameters.trained_shards if of_gradients else trainer.parameters.shards
    values = {p.placement.name: p.grad / trainer.loss_scale.scale if of_gradients else p.main for p in shards}
    together: dict[str, Tensor] = {}
    held_by_ranks = gather_objects(rectangles(shards, values), trainer.mesh.group("world"))
    if not on_all_ranks and trainer.mesh.rank > 0:
        return {}
    for held in held_by_ranks:
        for name, shape, offsets, values_held in held:
            part = torch.as_tensor(values_held)
            tensor = together.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
            place = tuple(slice(o, o + size) for o, size in zip(offsets, part.shape, strict=True))
            here = tensor[place]
            assert bool((here.isnan() | (here == part) | part.isnan()).all()), f"{name} differs between ranks"
            tensor[place] = part
    assert not any(bool(tensor.isnan().any()) for tensor in together.values())
    return together


def small_trainer(layout: Layout, *overrides: str) -> tuple[Trainer, list[Batch]]:
    """A trainer, and the micro-batches of its first step."""
    config = tiny(*overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu"), config.parallel.timeout_s))
    BatchStages(config).enter(trainer)
    with loader_of(trainer, config) as loader:
        return trainer, loader.micro_batches(0)


def loader_of(trainer: Trainer, config: RunConfig) -> Loader:
    """The loader of a rank, of the batches of each stage."""
    mesh, batch, packing = trainer.mesh, config.batch, config.data.packing
    sizes = (batch.global_size, batch.micro_size, mesh.at.data, mesh.layout.data)
    return Loader(samples_of(packing), packing, *sizes, stage_at=BatchStages(config).loader_stage_at)


def train_layout(rank: int, world: int, layout: Layout, steps: int, *overrides: str) -> dict[str, Any]:
    """Train a few steps on one rank of a layout: numbers of units and of elements held, and what `train` returns."""
    torch.manual_seed(rank)  # nothing may depend on torch's own state
    config = tiny(*overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    found, units = train(trainer, range(steps)), trainer.parameters.flat_parameters
    return {
        **(found if rank == 0 else {}),
        "units": len(units),
        "elements": sum(unit.numel for unit in units),
        "masters": sum(unit.main.numel() for unit in units),
    }


def train(trainer: Trainer, steps: range) -> dict[str, Any]:
    """First weights, results and gradients of every step, weights and held-out loss; on the first rank those of all."""
    config, mesh = trainer.config, trainer.mesh
    first = whole(trainer, of_gradients=False, on_all_ranks=False)
    results, gradients = [], []
    stages, packing = BatchStages(config), config.data.packing
    stream = samples_of(packing)
    with loader_of(trainer, config) as loader:
        for step in steps:
            stages.enter(trainer)
            trainer.forward_backward(loader.micro_batches(num_samples(config, step), step))
            # before the update: an optimizer may write it in their place
            gradients.append(whole(trainer, of_gradients=True, on_all_ranks=False))
            results.append(trainer.read(trainer.update()))
            assert results[-1].weight_sums is None, "copies of weights differ"
    held_out = [stream[1000 + i] for i in range(4)]
    batches = [batch_of(held_out[i : i + 2], range(2), packing) for i in (0, 2)]
    return {
        "logits": grown_texts(LoadedModel(trainer.runner, trainer.stages.schedule, mesh, config.model, None, None)),
        "first": first,
        "results": results,
        "gradients": gradients,
        "weights": whole(trainer, of_gradients=False, on_all_ranks=False),
        "validation": mean_loss(trainer.runner, trainer.stages.schedule, batches, mesh),
    }


@lru_cache(maxsize=8)
def one_process(steps: int, *overrides: str) -> dict[str, Any]:
    """`train_layout` on one process, with which several layouts are compared."""
    return train_layout(0, 1, Layout(), steps, *overrides)


def grown_texts(model: LoadedModel) -> Tensor:
    """Scores [3, 2, vocab] after two texts of 7 and 5 tokens and after each of two more, on all ranks."""
    reader = Reader(model, [7, 5], 2)
    tokens = torch.arange(10, 28).view(2, 9)
    tokens[1, :2] = 0  # before the shorter one
    found = []
    for part in tokens.split([7, 1, 1], dim=1):
        scores = reader.read(part)
        empty = torch.zeros(2, model.config.vocab, dtype=torch.promote_types(model.runner.dtype, torch.float32))
        found.append(all_reduce(empty if scores is None else scores.contiguous(), model.mesh.group("pipeline")))
    return torch.stack(found)


def compare(ours: dict[str, Any], one: dict[str, Any], tolerance: float, frozen: Collection[str] = ()) -> None:
    """Initial weights bit for bit; losses, norms, every gradient of every step and the final weights to rounding. All
    weights move but the frozen ones, which have no gradient, and those of an expert that no token chose."""
    assert ours["first"].keys() == one["first"].keys()
    assert all(torch.equal(ours["first"][name], weight) for name, weight in one["first"].items())
    for mine, reference in zip(ours["results"], one["results"], strict=True):
        assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)
        assert (mine.mtp_loss is None) == (reference.mtp_loss is None)
        assert (mine.mtp_loss or 0.0) == pytest.approx(reference.mtp_loss or 0.0, rel=tolerance)
        assert (mine.max_attention_logit is None) == (reference.max_attention_logit is None)
        assert (mine.max_attention_logit or 0.0) == pytest.approx(reference.max_attention_logit or 0.0, rel=tolerance)
        assert (mine.experts or {}) == pytest.approx(reference.experts or {}, rel=tolerance)
    for mine, reference in zip(ours["gradients"], one["gradients"], strict=True):
        assert mine.keys() == reference.keys() == one["first"].keys() - set(frozen)
        for name, gradient in reference.items():
            # a key's bias has gradient 0 in exact arithmetic: the terms that cancel give the scale of rounding
            scale = max(float(gradient.abs().max()), 0.01)
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=100 * tolerance * scale, msg=name)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1000 * tolerance, msg=name)
        still = torch.equal(weight, one["first"][name]) and torch.equal(ours["weights"][name], weight)
        assert still == (name in frozen or (still and ".experts." in name)), f"{name} moved or did not"
    torch.testing.assert_close(ours["logits"], one["logits"], rtol=0, atol=1000 * tolerance)
    assert ours["validation"] == pytest.approx(one["validation"], rel=1000 * tolerance)
