"""Algorithms to a collective with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import Handle, start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Algorithms


class CollectiveShape(NamedTuple):
    """What a group gathers, or sums and scatters, or both, again and again."""

    group: dist.ProcessGroup
    numel: int
    """Elements of all ranks together, a multiple of their number."""
    dtype: torch.dtype
    gathered: bool
    summed: bool


def gather_algorithms(group: dist.ProcessGroup) -> list[str]:
    """Algorithms to gather, the preferred one first. An accelerator keeps its backend's own."""
    return ["exchange", "own"] if dist.get_backend(group) == "gloo" else ["own"]


def scatter_algorithms(group: dist.ProcessGroup) -> list[str]:
    """Algorithms to reduce and scatter, the preferred one first. All add up in the order of the ranks: where an element
    stands in a message must not change its sum. gloo's own adds up in that of its ring; for two ranks that is the same.
    An accelerator's backend is left its own."""
    if dist.get_backend(group) != "gloo":
        return ["own"]
    return ["exchange", "own"] if dist.get_world_size(group) == 2 else ["exchange"]


def gather_trial(message: CollectiveShape, way: str) -> Callable[[], object]:
    """Gathers once, on a CPU."""
    whole, part = _whole_and_part(message)
    return lambda: _completed(start_all_gather(whole, part, message.group, Algorithms(gather=way)))


def scatter_trial(message: CollectiveShape, way: str) -> Callable[[], object]:
    """Reduces and scatters once, on a CPU."""
    whole, part = _whole_and_part(message)
    return lambda: _completed(start_reduce_scatter(part, whole, message.group, Algorithms(scatter=way)))


def _whole_and_part(message: CollectiveShape) -> tuple[Tensor, Tensor]:
    ranks = dist.get_world_size(message.group)
    return torch.zeros(message.numel, dtype=message.dtype), torch.zeros(message.numel // ranks, dtype=message.dtype)


def _completed(work: Handle | None) -> None:
    assert work is not None
    work.wait()
