"""Ways to a collective with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import Waitable, start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Ways


class Message(NamedTuple):
    """What a group gathers, or sums and scatters, or both, again and again."""

    group: dist.ProcessGroup
    numel: int
    """Elements of all ranks together, a multiple of their number."""
    dtype: torch.dtype
    gathered: bool
    summed: bool


def gather_ways(group: dist.ProcessGroup) -> list[str]:
    """Ways to gather, in the order of preference. An accelerator's backend is left its own, which knows the links."""
    return ["exchange", "own"] if dist.get_backend(group) == "gloo" else ["own"]


def scatter_ways(group: dist.ProcessGroup) -> list[str]:
    """Ways to reduce and scatter that add up in the order of the ranks, in the order of preference: where an element
    stands in a message must not change its sum. gloo's own adds up in that of its ring; for two ranks that is the same.
    An accelerator's backend is left its own."""
    if dist.get_backend(group) != "gloo":
        return ["own"]
    return ["exchange", "own"] if dist.get_world_size(group) == 2 else ["exchange"]


def gather_pass(message: Message, way: str) -> Callable[[], object]:
    """Gathers once, on a CPU."""
    whole, part = _whole_and_part(message)
    return lambda: _completed(start_all_gather(whole, part, message.group, Ways(gather=way)))


def scatter_pass(message: Message, way: str) -> Callable[[], object]:
    """Reduces and scatters once, on a CPU."""
    whole, part = _whole_and_part(message)
    return lambda: _completed(start_reduce_scatter(part, whole, message.group, Ways(scatter=way)))


def _whole_and_part(message: Message) -> tuple[Tensor, Tensor]:
    ranks = dist.get_world_size(message.group)
    return torch.zeros(message.numel, dtype=message.dtype), torch.zeros(message.numel // ranks, dtype=message.dtype)


def _completed(work: Waitable | None) -> None:
    assert work is not None
    work.wait()
