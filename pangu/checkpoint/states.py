"""Rectangles of logical tensors that a rank writes into checkpoints and compares between replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor
from torch.optim import Optimizer

from pangu.checkpoint.files import Slice
from pangu.zero.flat_parameter import Shard
from pangu.zero.sharded import ShardedParameters


def weights_of(parameters: ShardedParameters) -> Iterator[tuple[str, Slice]]:
    """Yield the names of logical tensors with the rectangles of their main parameters on this rank."""
    for shard in parameters.shards:
        yield from _rectangles(shard, shard.main)


def state_of(
    parameters: ShardedParameters, optimizer: Optimizer | None, kinds: Collection[str], owned: bool = False
) -> Iterator[tuple[str, Slice]]:
    """Yield this rank's rectangles as `KIND/NAME`: kind `weight`, the main parameters, or a state of the optimizer.

    States that are not elementwise are left out. `owned`: of ranks that hold the same, only the one that writes it.
    """
    shards = [shard for shard in parameters.shards if not owned or parameters.counts(shard)]
    states = {} if optimizer is None else optimizer.state
    for kind in kinds:
        for shard in shards:
            values = shard.main if kind == "weight" else states.get(shard.main, {}).get(kind)
            if isinstance(values, Tensor) and values.shape == shard.main.shape:
                yield from ((f"{kind}/{name}", part) for name, part in _rectangles(shard, values))


def _rectangles(shard: Shard, values: Tensor) -> Iterator[tuple[str, Slice]]:
    for part, offsets in shard.rectangles(values):
        yield shard.placement.name, Slice(part, shard.placement.shape, offsets)
