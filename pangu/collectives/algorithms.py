"""The algorithms of a collective, which give the same result, and a trial of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from pangu.collectives.reduce import start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Algorithms


class CollectiveShape(NamedTuple):
    """A collective that a group repeats: all-gather, reduce-scatter or both."""

    group: dist.ProcessGroup
    numel: int
    """Elements of all ranks together, a multiple of their number."""
    dtype: torch.dtype
    gathered: bool
    summed: bool


def gather_algorithms(group: dist.ProcessGroup) -> list[str]:
    """Algorithms of the all-gather, the preferred one first."""
    return ["exchange", "own"] if dist.get_backend(group) == "gloo" else ["own"]


def scatter_algorithms(group: dist.ProcessGroup) -> list[str]:
    """Algorithms of the reduce-scatter, the preferred one first. All add up in the order of the ranks: an element's
    offset in a message must not change its sum. gloo's own adds up in ring order, which is the same for two ranks
    only."""
    if dist.get_backend(group) != "gloo":
        return ["own"]
    return ["exchange", "own"] if dist.get_world_size(group) == 2 else ["exchange"]


def gather_trial(shape: CollectiveShape, algorithm: str) -> Callable[[], object]:
    """One all-gather, on a CPU."""
    whole, part = torch.zeros(shape.numel, dtype=shape.dtype), _part(shape)
    return lambda: start_all_gather(whole, part, shape.group, Algorithms(gather=algorithm)).wait()


def scatter_trial(shape: CollectiveShape, algorithm: str) -> Callable[[], object]:
    """One reduce-scatter, on a CPU."""
    whole, part = torch.zeros(shape.numel, dtype=shape.dtype), _part(shape)
    return lambda: start_reduce_scatter(part, whole, shape.group, Algorithms(scatter=algorithm)).wait()


def _part(shape: CollectiveShape) -> torch.Tensor:
    return torch.zeros(shape.numel // dist.get_world_size(shape.group), dtype=shape.dtype)
