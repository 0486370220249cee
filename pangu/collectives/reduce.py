"""Plain (not differentiable) collectives. A group of None is a group of one process: nothing happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` in place over `group` and return it."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to sum `tensor` in place over `group`; it holds the sum after `wait()` on the result."""
    return None if group is None else dist.all_reduce(tensor, group=group, async_op=True)


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to join the ranks' flat parts in `whole`, of which `part` may be a view; valid after `wait()`."""
    if group is None:
        return None
    return _named("all_gather_single", "all_gather_into_tensor")(whole, part, group=group, async_op=True)


def start_reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin to sum the flat `whole` over the ranks, of which this rank's share goes to `part`, which may be a view of
    it; valid after `wait()`."""
    if group is None:
        return None
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(part, whole, group=group, async_op=True)


def _named(name: str, before: str) -> Callable[..., dist.Work]:
    """A function of torch.distributed under the name it has from torch 2.13 on, or under the one it had before."""
    return getattr(dist, name, None) or getattr(dist, before)


def sum_of(value: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Sum of one number over `group`, in double precision."""
    if group is None:
        return value
    return float(all_reduce(torch.tensor(value, dtype=torch.float64, device=device), group))


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """`value` of every rank of `group`, in rank order. For small messages between phases, never inside a step."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def largest(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Elementwise maximum of `tensor` over `group`, in place."""
    return all_reduce(tensor, group, dist.ReduceOp.MAX)
