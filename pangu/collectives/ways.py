"""Ways to a collective with the same result."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import Waitable, start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Ways


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


def gather_pass(group: dist.ProcessGroup, way: str, numel: int, dtype: torch.dtype) -> Callable[[], object]:
    """Gathers `numel` elements of all ranks together, a multiple of their number, on a CPU."""
    whole, part = _whole_and_part(group, numel, dtype)
    return lambda: _completed(start_all_gather(whole, part, group, Ways(gather=way)))


def scatter_pass(group: dist.ProcessGroup, way: str, numel: int, dtype: torch.dtype) -> Callable[[], object]:
    """Reduces and scatters `numel` elements, as `gather_pass`."""
    whole, part = _whole_and_part(group, numel, dtype)
    return lambda: _completed(start_reduce_scatter(part, whole, group, Ways(scatter=way)))


def _whole_and_part(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(numel, dtype=dtype), torch.zeros(numel // dist.get_world_size(group), dtype=dtype)


def _completed(work: Waitable | None) -> None:
    assert work is not None
    work.wait()
