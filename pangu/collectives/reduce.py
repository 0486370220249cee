"""Collectives without autograd; with a group of None, a single process, they do nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup

ROOM, LENGTH_BYTES = 1024, 8
"""Bytes of a value in the first message of `gather_objects`, and those of its length, which it begins with."""


def all_reduce(tensor: Tensor, group: AxisGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place and return it."""
    if group is not None:
        with group.recorder.blocking(group.axis):
            if tensor.dtype == torch.float64 and dist.get_backend(group.process_group) == "hccl":
                _gather_and_reduce(tensor, group, op)
            else:
                dist.all_reduce(tensor, op=op, group=group.process_group)
    return tensor


def _gather_and_reduce(tensor: Tensor, group: AxisGroup, op: Any) -> None:
    """Reduce a few fp64 numbers with an all-gather, as HCCL (Ascend) does not reduce fp64: HcclAllReduce."""
    each = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(each, tensor, group=group.process_group)
    reduction: Any = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}[op]
    tensor.copy_(reduction(torch.stack(each), 0))


class Handle(Protocol):
    """Collective or copy in flight."""

    def wait(self) -> Any:
        """Block until it is complete; on a GPU, let the current stream do so instead."""


@dataclass(frozen=True)
class Completion:
    """Handle made of a wait function; by default it is complete."""

    wait: Callable[[], Any] = lambda: None


def start_all_reduce(tensor: Tensor, group: AxisGroup | None, largest: bool = False) -> Handle:
    """Start to sum `tensor` in place over the group, or to take the elementwise maximum if `largest`."""
    if group is None:
        return Completion()
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return _watched(group, dist.all_reduce(tensor, op=op, group=group.process_group, async_op=True), tensor)


def start_all_gather(whole: Tensor, part: Tensor, group: AxisGroup | None) -> Handle:
    """Start to all-gather the flat shards `part`, which may be a view of `whole`."""
    if group is None:
        return Completion()
    if group.exchanges:  # one step, and a copy of the shard per rank
        copies = part.expand(group.size, -1).contiguous().view(-1)
        work = dist.all_to_all_single(whole, copies, group=group.process_group, async_op=True)
        return _watched(group, work, copies)
    gather = _named("all_gather_single", "all_gather_into_tensor")
    return _watched(group, gather(whole, part, group=group.process_group, async_op=True), part)


def start_reduce_scatter(part: Tensor, whole: Tensor, group: AxisGroup | None) -> Handle:
    """Start to sum the flat `whole` over the group; this rank's shard goes to `part`, which may be a view of it."""
    if group is None:
        return Completion()
    if not group.exchanges:
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return _watched(group, scatter(part, whole, group=group.process_group, async_op=True), whole)
    # add in rank order, wherever an element lies in a message
    received = torch.empty_like(whole)
    exchange = _watched(group, dist.all_to_all_single(received, whole, group=group.process_group, async_op=True), whole)

    def add() -> None:
        exchange.wait()
        first, *others = received.chunk(group.size)
        for other in others:
            first.add_(other)
        part.copy_(first)

    return Completion(add)


def start_ordered_all_reduce(whole: Tensor, group: AxisGroup | None) -> Handle:
    """Start an all-reduce with the sums of `start_reduce_scatter`, bit for bit; the group size divides the length."""
    if group is None or not group.exchanges or group.size == 2:  # a + b = b + a
        return start_all_reduce(whole, group)
    part = torch.empty_like(whole.chunk(group.size)[0])
    scattered = start_reduce_scatter(part, whole, group)

    def join() -> None:
        scattered.wait()
        start_all_gather(whole, part, group).wait()

    return Completion(join)


def _watched(group: AxisGroup, work: dist.Work, read: Tensor) -> Handle:
    return group.recorder.watched(group.axis, work, read)


def _named(name: str, before: str) -> Callable[..., dist.Work]:
    """Return a function of torch.distributed by its name since torch 2.13, or by its earlier name."""
    return getattr(dist, name, None) or getattr(dist, before)


def gather_objects(value: Any, group: AxisGroup | None) -> list[Any]:
    """Return `value` of every rank, in rank order; for small messages between phases, never inside a step."""
    # One all-gather, and a second one only if a value is longer than `ROOM`; torch's `all_gather_object` sends the
    # lengths first, which costs a round trip and a host sync more.
    if group is None:
        return [value]
    content = pickle.dumps(value)
    content = len(content).to_bytes(LENGTH_BYTES, "big") + content
    received = _gather_bytes(content, ROOM, group)
    longest = LENGTH_BYTES + max(int.from_bytes(one[:LENGTH_BYTES], "big") for one in received)
    if longest > ROOM:
        received = _gather_bytes(content, longest, group)
    return [pickle.loads(one[LENGTH_BYTES:]) for one in received]


def _gather_bytes(content: bytes, size: int, group: AxisGroup) -> list[bytes]:
    """Return the first `size` bytes of every rank's content, padded with zeros."""
    part = torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8).to(group.device)
    parts = part.new_empty(group.size * size)
    _named("all_gather_single", "all_gather_into_tensor")(parts, part, group=group.process_group)
    return [one.numpy().tobytes() for one in parts.cpu().chunk(group.size)]


def largest_of(values: Sequence[float], mesh: Mesh) -> list[float]:
    """Return the elementwise maximum of `values` over all ranks."""
    if not values:
        return []
    return largest(torch.tensor(values, dtype=torch.float64, device=mesh.device), mesh.group("world")).tolist()


def largest(tensor: Tensor, group: AxisGroup | None) -> Tensor:
    """Take the elementwise maximum of `tensor` over the group, in place."""
    return all_reduce(tensor, group, dist.ReduceOp.MAX)
