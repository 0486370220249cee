"""Exchange of rows between the ranks of a group, as many from each to each as a step decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import Completion, Handle
from pangu.topology.experts import ExpertRank
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup


@dataclass(frozen=True)
class ExpertRegion(ExpertRank):
    """The ranks that hold all experts together, and this rank's share."""

    group: AxisGroup | None = None

    @classmethod
    def on(cls, mesh: Mesh) -> ExpertRegion:
        share = ExpertRank.of(mesh.layout, mesh.at)
        return cls(share.rank, share.size, share.tensor, mesh.group("expert"))


def exchange_counts(counts: Tensor, group: AxisGroup | None) -> Tensor:
    """Whole numbers [ranks, ...] for each rank of the group -> those that each has for this one."""
    received = torch.empty_like(counts)
    one_each = [1] * len(counts)
    start_exchange(received, counts, one_each, one_each, group).wait()
    return received


def host_numbers(counts: Tensor, most: Sequence[int]) -> Any:
    """Counts [sent and received, ranks, parts] as nested lists. The host waits for the device, which alone knows where
    tokens go; `most`, the rows of each part of which none is dropped, is for who has no device."""
    return counts.tolist()


def start_exchange(
    received: Tensor, rows: Tensor, from_each: Sequence[int], to_each: Sequence[int], group: AxisGroup | None
) -> Handle:
    """Begin to send the first `to_each[0]` rows to the first rank, the next `to_each[1]` to the second, and so on, and
    to receive `from_each` in the same order."""
    if group is None:
        received.copy_(rows)
        return Completion()
    rows = rows.contiguous()
    work = dist.all_to_all_single(
        received, rows, list(from_each), list(to_each), group=group.process_group, async_op=True
    )
    return group.recorder.watched(group.axis, work, rows)


class Exchange:
    """A differentiable exchange, once. What is computed between `begin` and `end` runs beside it; so does, in backward,
    what is computed between the gradients of `end` and `begin`."""

    def __init__(self, to_each: Sequence[int], from_each: Sequence[int], group: AxisGroup | None) -> None:
        self._to_each, self._from_each, self._group = to_each, from_each, group
        self._under_way: tuple[Tensor, Handle] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Rows [sent, width] -> [received, width], to be read after `end`."""
        return _Begin.apply(rows, self)

    def end(self, rows: Tensor) -> Tensor:
        """What `begin` gave, once it is there."""
        return _End.apply(rows, self)

    def start(self, rows: Tensor, back: bool) -> Tensor:
        """Begin to send rows, or gradients `back`."""
        to_each, from_each = (self._from_each, self._to_each) if back else (self._to_each, self._from_each)
        received = rows.new_empty((sum(from_each), *rows.shape[1:]))
        # without its place in the graph, which holds this object: a recompute that ends early may never finish it
        self._under_way = received.detach(), start_exchange(received, rows, from_each, to_each, self._group)
        return received

    def finish(self) -> Tensor:
        """What was received."""
        assert self._under_way is not None
        (received, handle), self._under_way = self._under_way, None
        handle.wait()
        return received


class _Begin(Function):
    """Forward: begin to send rows. Backward: the gradients that `_End` has begun to send."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _End(Function):
    """Forward: wait for rows. Backward: begin to send their gradients, and pass on anything of their shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grads[0], back=True)
        return grads[0], None
