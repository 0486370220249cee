"""All-to-all exchange of token rows between expert-parallel ranks, with any number of rows for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import Completion, Handle, start_all_gather
from pangu.config.parallelism import same_sequences
from pangu.topology.experts import ExpertRank
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup


@dataclass(frozen=True)
class ExpertRegion(ExpertRank):
    """Expert-parallel group, which holds all experts together, and this rank's share of them."""

    group: AxisGroup | None = None
    fixed: bool = False
    """True to exchange as many rows as the router can send, also where that is more than an even share."""
    repeats: int = 1
    """Number of neighboring ranks with the same sequences."""

    @classmethod
    def on(cls, mesh: Mesh, fixed: bool = False) -> ExpertRegion:
        """Return the region of a mesh."""
        layout = mesh.layout
        share = ExpertRank.of(layout, mesh.at)
        repeats = same_sequences(layout.expert_tensor, layout.tensor, layout.context)
        return cls(share.rank, share.size, share.tensor, mesh.group("expert"), fixed, repeats)

    def gather_counts(self, counts: Tensor) -> tuple[Tensor, int]:
        """Return counts [sequences, ...] of all sequences of the group in order, and the index of this rank's first."""
        parts = counts.new_empty((self.size, *counts.shape))
        start_all_gather(parts.view(-1), counts.contiguous().view(-1), self.group).wait()
        return parts[:: self.repeats].flatten(0, 1), self.rank // self.repeats * len(counts)


def exchange_rows(rows: Tensor, group: AxisGroup | None) -> Tensor:
    """Send row i of `rows` [ranks, ...] to the i-th of as many neighboring ranks, and return the rows they sent here.

    With two rows in a group of four, ranks 0 and 1 exchange, and so do 2 and 3.
    """
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    ranks, each = len(rows), [1] * len(rows)
    if group is not None and ranks < group.size:
        here = dist.get_rank(group.process_group) // ranks
        each = [int(rank // ranks == here) for rank in range(group.size)]
    start_exchange(received, rows, each, each, group).wait()
    return received


def host_numbers(counts: Tensor, most: Sequence[int]) -> Any:
    """Return counts [sent and received, ranks, parts] as nested lists: a host sync, as only the device knows them."""
    # A dry run, which has no device, replaces this function: `most` has the rows of each part if none is dropped.
    return counts.tolist()


def start_exchange(
    received: Tensor, rows: Tensor, from_each: Sequence[int], to_each: Sequence[int], group: AxisGroup | None
) -> Handle:
    """Start to send `to_each[i]` consecutive rows to each rank i, and to receive `from_each[i]` rows, in rank order."""
    if group is None:
        received.copy_(rows)
        return Completion()
    rows = rows.contiguous()
    work = dist.all_to_all_single(
        received, rows, list(from_each), list(to_each), group=group.process_group, async_op=True
    )
    return group.recorder.watched(group.axis, work, rows)


class Exchange:
    """Differentiable exchange, used once; computation between `begin` and `end` overlaps it.

    In the backward pass, computation between the gradients of `end` and `begin` overlaps the exchange of gradients.
    """

    def __init__(self, to_each: Sequence[int], from_each: Sequence[int], group: AxisGroup | None) -> None:
        """Prepare to send `to_each[i]` rows to each rank i, and to receive `from_each[i]` rows."""
        self._to_each, self._from_each, self._group = to_each, from_each, group
        self._under_way: tuple[Tensor, Handle] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Start to send rows [sent, width]; return [received, width], which must not be read before `end`."""
        return _Begin.apply(rows, self)

    def end(self, rows: Tensor) -> Tensor:
        """Wait for the rows that `begin` returned, and return them."""
        return _End.apply(rows, self)

    def start(self, rows: Tensor, back: bool) -> Tensor:
        """Start to send rows forward or, with `back`, their gradients in the opposite direction."""
        to_each, from_each = (self._from_each, self._to_each) if back else (self._to_each, self._from_each)
        received = rows.new_empty((sum(from_each), *rows.shape[1:]))
        # detached from the graph, which holds this object: a recompute that stops early may never finish the exchange
        self._under_way = received.detach(), start_exchange(received, rows, from_each, to_each, self._group)
        return received

    def finish(self) -> Tensor:
        """Wait for the rows in flight and return them."""
        assert self._under_way is not None
        (received, handle), self._under_way = self._under_way, None
        handle.wait()
        return received


class _Begin(Function):
    """Forward: start to send rows. Backward: wait for the gradients that `_End` sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _End(Function):
    """Forward: wait for rows. Backward: start to send their gradients; pass on any tensor of that shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grads[0], back=True)
        return grads[0], None
