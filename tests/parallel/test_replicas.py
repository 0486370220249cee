"""Copies that differ in one bit are found and named; equal ones are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pangu.data.batch import make_batch
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.replicas import find_replica_difference
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import parallel_keys
from tests.threads import Ranks


def answers(rank: int, world: int, layout: Layout, culprit: int, kind: str) -> tuple[list[str | None], str]:
    """What the check says after a step, and once a bit of a copied tensor is turned over on one rank; its name."""
    experts = ["model.experts=12"] * layout.splits_experts
    config = tiny(*parallel_keys(layout), "lr_schedule.warmup_steps=1", *experts)
    mesh = Mesh.connect(layout, torch.device("cpu"))
    trainer = Trainer(config, mesh)
    tokens = np.arange(8 * 17).reshape(8, 17) % 101
    mine = range(mesh.at.data, 8 - 8 % (2 * layout.data), layout.data)
    trainer.train_step(
        [make_batch(tokens[[i, i + layout.data]], [i, i + layout.data], config.data.packing) for i in mine[::2]]
    )
    first = find_replica_difference(trainer)
    tied = layout.pipeline > 1 and layout.data == 1
    places = ((shard, shard.placement) for shard in trainer.shards)
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
        (Layout(data=2), 1, "weight", "rank 0, 1 (replicas axis)"),
        (Layout(tensor=2, sequence=True), 0, "exp_avg", "rank 0, 1 (tensor axis)"),
        (Layout(tensor=2, data=2, zero=2), 3, "weight", "rank 2, 3 (tensor axis)"),
        (Layout(data=4, zero=1, zero_group=2), 2, "exp_avg_sq", "rank 0, 2 (replicas axis)"),
        (Layout(pipeline=2), 1, "weight", "rank 0, 1 (pipeline axis)"),
        (Layout(pipeline=2, data=2), 3, "weight", "rank 2, 3 (replicas axis)"),
        (Layout(data=4, expert=2), 3, "weight", "rank 1, 3 (replicas axis)"),
        (Layout(tensor=2, data=2, expert=2, expert_tensor=1), 3, "exp_avg", "rank 1, 3 (replicas axis)"),
        (Layout(tensor=2, data=3, expert=3, expert_tensor=1), 4, "weight", "rank 1, 4 (expert_replicas axis)"),
    ],
)
def test_one_bit_is_found(ranks: Ranks, layout: Layout, culprit: int, kind: str, differ: str) -> None:
    told = ranks.run(layout.world, answers, layout, culprit, kind)
    for (before, after), _ in told:
        assert before is None
        assert after is not None
        assert after.startswith(f"{told[culprit][1]} from element ")
        assert after.endswith(differ)
