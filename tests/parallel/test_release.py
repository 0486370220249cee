"""Who trains several models one after another, as a notebook or this suite does, gets back what a model took."""

from __future__ import annotations

import gc
import weakref

import pytest

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks


def kept(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """Units, and with them weights and process groups, that are there after a step whose trainer is gone."""
    trainer, batches = small_trainer(layout, *OVERRIDES, *overrides)
    trainer.train_step(batches)
    units = [weakref.ref(unit) for unit in trainer.parameters.flat_parameters]
    assert all(unit() is not None for unit in units)
    del trainer
    gc.collect()
    return sum(unit() is not None for unit in units)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(), ()),
        (Layout(), ("memory.recompute=full", "loss.chunk=5", "memory.offload=[activations]")),
        (Layout(tensor=2, sequence=True), ("memory.recompute=selective", "parallel.overlap_chunks=3")),
        (Layout(data=2, zero=3), ("optimizer=lamb", "memory.offload=[optimizer,parameters]")),
        (Layout(pipeline=2, virtual_stages=2), ("parallel.schedule=zb_v", "model.layers=5")),
    ],
    ids=str,
)
def test_a_trainer_leaves_nothing_behind(ranks: Ranks, layout: Layout, overrides: tuple[str, ...]) -> None:
    assert ranks.run(layout.world, kept, layout, *overrides) == [0] * layout.world
