"""A state that is not finite is found wherever it lies."""

from __future__ import annotations

import math

import pytest

from pangu.optim.moments import MOMENTS
from pangu.topology.layout import Layout
from pangu.training.faults import find_non_finite
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks


@pytest.mark.parametrize(
    "words", [(), ("optimizer=lamb", "optimizer.moments=bf16", "train.frozen=[layers.0.*]")], ids=["adam", "lamb"]
)
def test_weights_and_moments_are_looked_at(words: tuple[str, ...]) -> None:
    trainer, _ = small_trainer(Layout(), *OVERRIDES, *words)
    trainer.step = 1  # before the first, no moments are saved
    assert find_non_finite(trainer) is None
    trained = trainer.parameters.trained_shards
    places = {f"weight/{shard.placement.name}": shard.main for shard in (trainer.parameters.shards[-1], trained[0])}
    places |= {
        f"{kind}/{trained[1].placement.name}": trainer.optimizer.state[trained[1].main][kind] for kind in MOMENTS
    }
    for name, values in places.items():
        before = values[-1].clone()
        values[-1] = 3e38  # its square is not finite
        assert find_non_finite(trainer) is None
        for value in (math.inf, -math.inf, math.nan):
            values[-1] = value
            assert find_non_finite(trainer) == f"rank 0: {name}"
        values[-1] = before


def on_every_layout(rank: int, world: int) -> list[tuple[str, str | None]]:
    """What is expected and what all ranks say where the last one keeps an infinite moment."""
    told = []
    for layout, words in LAYOUTS:
        trainer, _ = small_trainer(layout, *OVERRIDES, *words)
        trainer.step = 1
        shard = trainer.parameters.trained_shards[0]
        if rank == world - 1:
            trainer.optimizer.state[shard.main]["exp_avg"][0] = math.inf
        told.append((f"rank 1: exp_avg/{shard.placement.name}", find_non_finite(trainer)))
    return told


LAYOUTS = [
    (Layout(data=2), ()),
    (Layout(data=2, zero=3), ("memory.offload=[optimizer,parameters]",)),
    (Layout(tensor=2), ("optimizer.moments=bf16",)),
]


def test_all_ranks_hear_of_one(ranks: Ranks) -> None:
    first, last = ranks.run(2, on_every_layout)
    assert [told for _, told in first] == [expected for expected, _ in last] == [told for _, told in last]
