"""Rectangles of logical tensors that a rank writes into checkpoints and compares between replicas."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.checkpoint.files import Slice, rectangles_of
from pangu.training.step import MOMENTS, Trainer


def weights_of(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """Yield the names of logical tensors with the rectangles of their fp32 weights that this rank updates."""
    for shard in trainer.shards:
        yield from rectangles_of(shard, shard.main)


def state_of(trainer: Trainer, every_kind: bool = False) -> Iterator[tuple[str, Slice]]:
    """Yield this rank's rectangles as `KIND/NAME`: weights and, after the first step, the optimizer's moments."""
    yield from ((f"weight/{name}", part) for name, part in weights_of(trainer))
    for kind in MOMENTS if every_kind or trainer.step > trainer.skipped else ():
        for shard in trainer.parameters.trained_shards:
            moments = rectangles_of(shard, trainer.optimizer.state[shard.main][kind])
            yield from ((f"{kind}/{name}", part) for name, part in moments)
