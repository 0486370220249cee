"""Copies that differ in one bit are found and named; equal ones are not."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from pangu.data.batch import make_batch
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.replicas import _digest, find_replica_difference
from pangu.training.step import Trainer
from pangu.zero.unshard import Unsharder
from tests.configs import tiny
from tests.parallel.harness import parallel_keys
from tests.threads import Ranks, replaced_here


def answers(rank: int, world: int, layout: Layout, culprit: int, kind: str) -> tuple[list[str | None], str]:
    """What the check says after a step, and once a bit of a copied tensor is turned over on one rank; its name."""
    experts = ["model.experts=12"] * layout.splits_experts
    config = tiny(*parallel_keys(layout), "lr_schedule.warmup_steps=1", *experts)
    mesh = Mesh.connect(layout, torch.device("cpu"))
    trainer = Trainer(config, mesh)
    rows = 2 * layout.data * trainer.stages.schedule.micro_batches
    tokens = np.arange(rows * 17).reshape(rows, 17) % 101
    mine = range(mesh.at.data, rows, layout.data)
    trainer.train_step(
        [make_batch(tokens[[i, i + layout.data]], [i, i + layout.data], config.data.packing) for i in mine[::2]]
    )
    first = find_replica_difference(trainer)
    tied = layout.pipeline > 1 and layout.data == 1
    places = ((shard, shard.placement) for shard in trainer.parameters.shards)
    shard = next(
        shard
        for shard, at in places
        if (at.expert if layout.splits_experts else at.shared if tied else at.is_vector and at.cut_dim is None)
    )
    values = shard.main if kind == "weight" else trainer.optimizer.state[shard.main][kind]
    if rank == culprit:
        values.view(torch.int32)[-1] ^= 1
    return [first, find_replica_difference(trainer)], f"{kind}/{shard.placement.name}"


@pytest.mark.parametrize(
    ("layout", "culprit", "kind", "differ"),
    [
        (Layout(data=2), 1, "weight", "rank 0 on H, rank 1 on H (replicas axis) from each other"),
        (Layout(tensor=2, sequence=True), 0, "exp_avg", "rank 0 on H, rank 1 on H (tensor axis) from each other"),
        (Layout(tensor=2, data=2, zero=2), 3, "exp_avg", "rank 2 on H, rank 3 on H (tensor axis) from each other"),
        (Layout(data=4, zero=1, zero_group=2), 2, "exp_avg_sq", "rank 0 on H, rank 2 on H (replicas axis) from each o"),
        (Layout(pipeline=2), 1, "weight", "rank 0 on H, rank 1 on H (pipeline axis) from each other"),
        (Layout(data=3), 1, "exp_avg", "rank 1 on H (replicas axis) from the other copies"),
        (Layout(data=4, expert=2), 3, "exp_avg", "rank 1 on H, rank 3 on H (replicas axis) from each other"),
        (Layout(tensor=2, data=2, expert=2, expert_tensor=1), 3, "exp_avg", "rank 1 on H, rank 3 on H (replicas axis)"),
        (
            Layout(tensor=2, data=3, expert=3, expert_tensor=1),
            4,
            "weight",
            "rank 1 on H, rank 4 on H (expert_replicas axis) from each other",
        ),
    ],
)
def test_one_bit_is_found(ranks: Ranks, layout: Layout, culprit: int, kind: str, differ: str) -> None:
    told = ranks.run(layout.world, answers, layout, culprit, kind)
    for (before, after), _ in told:
        assert before is None
        assert after is not None
        assert after.startswith(f"{told[culprit][1]} from element ")
        assert differ.replace("H", socket.gethostname()) in after


def computing(rank: int, world: int, layout: Layout, culprit: int, words: tuple[str, ...]) -> list[str | None]:
    """What the check says before and after a bit of a weight that one rank computes with is turned over: where it is
    kept, or at stage 3, where nothing is, in what arrives."""
    experts = ["model.experts=12"] * layout.splits_experts
    config = tiny(*parallel_keys(layout), *words, *experts)
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    told = [find_replica_difference(trainer)]
    flats = trainer.parameters.flat_parameters
    flat = next(flat for flat in flats if flat.sharding.experts or not layout.splits_experts)
    finish = Unsharder.finish

    def flip(weights: torch.Tensor) -> None:
        weights.view(torch.int16 if weights.element_size() == 2 else torch.int32)[flat.numel // 2] ^= 1 << 3

    def finish_and_flip(self: Unsharder, given: Any) -> None:
        finish(self, given)
        if given is flat:
            flip(flat.weights.data)

    stage3 = flat.sharding.stage == 3
    if rank == culprit and not stage3:
        trainer.parameters.unsharder.wait()
        flip(flat.weights)
    with replaced_here(Unsharder, finish=finish_and_flip) if rank == culprit and stage3 else nullcontext():
        told.append(find_replica_difference(trainer))
    return told


BF16 = ("precision=bf16",)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        *((Layout(data=2, zero=stage), words) for stage in range(4) for words in ((), BF16, ("precision=fp8",))),
        *((Layout(data=4, zero=stage, zero_group=2), BF16) for stage in (1, 2, 3)),
        *((Layout(data=4, zero=stage, expert=2), BF16) for stage in range(4)),
        (Layout(data=2, context=2, zero=3), BF16),
        (Layout(pipeline=2, data=2, zero=2), BF16),
        (Layout(data=2, zero=2), (*BF16, "memory.offload=[optimizer]")),
        (Layout(data=2, zero=3), (*BF16, "memory.offload=[optimizer,parameters]")),
    ],
    ids=str,
)
def test_one_bit_of_a_weight_that_computes_is_found(ranks: Ranks, layout: Layout, words: tuple[str, ...]) -> None:
    """At every ZeRO stage and in every format, whatever is done with the fp32 values."""
    for before, after in ranks.run(layout.world, computing, layout, layout.world - 1, words):
        assert before is None
        assert after is not None
        assert "computing/" in after or "weight/" in after
        assert f"rank {layout.world - 1} on {socket.gethostname()}" in after


def test_weights_that_a_single_rank_rounds_wrongly_are_found(ranks: Ranks) -> None:
    """A shard of stage 3 has no copy, and every replica gathers the same wrong weights."""
    for before, after in ranks.run(2, rounded_wrongly, Layout(data=2, zero=3)):
        assert before is None
        assert after is not None
        assert after.endswith(f"rank 1 on {socket.gethostname()} computes with other weights than it updates")


def rounded_wrongly(rank: int, world: int, layout: Layout) -> list[str | None]:
    trainer = Trainer(tiny(*parallel_keys(layout), *BF16), Mesh.connect(layout, torch.device("cpu")))
    told = [find_replica_difference(trainer)]
    if rank == 1:
        trainer.parameters.flat_parameters[0].local.view(torch.int16)[5] ^= 1
    return [*told, find_replica_difference(trainer)]


def test_a_digest_changes_with_any_bit_and_any_order() -> None:
    tensor = torch.randn(3, 701, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = tensor.to(dtype)
        bits = values.view(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()])
        first = _digest(values)
        for place, bit in ((0, 0), (1024, values.element_size() * 8 - 1), (2102, 7)):
            changed = bits.clone()
            changed[place] ^= -(1 << bit) if bit == values.element_size() * 8 - 1 else 1 << bit
            assert not torch.equal(_digest(changed), first)
        for one, other in ((0, 1), (0, 1024), (5, 2100), (1030, 2060)):
            swapped = bits.clone()
            swapped[one], swapped[other] = bits[other], bits[one]
            assert not torch.equal(_digest(swapped), first)
        assert torch.equal(_digest(values.t()), _digest(values.t().contiguous()))
