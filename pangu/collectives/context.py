"""Exchanges of attention keys, values and heads between context-parallel ranks, which split each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.conjugate import conjugate
from pangu.collectives.exchange import exchange_rows, start_exchange
from pangu.collectives.reduce import Handle, start_all_gather, start_reduce_scatter
from pangu.config.parallelism import context_kind, ulysses_size
from pangu.config.schema import RunConfig
from pangu.topology.context import ContextRank, by_rank, in_order
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup


@dataclass(frozen=True)
class ContextRegion(ContextRank):
    """Context-parallel group and this rank's position in it."""

    group: AxisGroup | None = None
    kind: str = "gather"
    """Attention algorithm, a value of `parallel.context_kind` other than `auto`."""
    ulysses: int = 1
    """Number of neighboring ranks that exchange heads; the ranks at the same place of each block form a ring."""
    stride: int = 1
    """Distance between ranks in `group`."""

    @classmethod
    def of(cls, mesh: Mesh, config: RunConfig) -> ContextRegion:
        """Return the region of a mesh, with the algorithm that the configuration chooses."""
        at, size, group = mesh.at.context, mesh.layout.context, mesh.group("context")
        return cls(at, size, group, context_kind(config), ulysses_size(config))

    @property
    def blocks(self) -> tuple[ContextRegion, ContextRegion]:
        """Return the region of this rank's block, which exchanges heads, and the region of the blocks' ring."""
        # four ranks in blocks of two, with chunks    0 7   1 6 | 2 5   3 4
        # after an exchange of heads, as two ranks    0 1 6 7   | 2 3 4 5
        (ring, place), size = divmod(self.rank, self.ulysses), self.ulysses
        block = replace(self, rank=place, size=size, kind="ulysses")
        return block, replace(self, rank=ring, size=self.size // size, ulysses=1, stride=size)

    def totals(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return integer counts [2, ...] of this rank summed over all chunks [...] and before its own ones [2, ...]."""
        parts = counts.new_empty((self.size, *counts.shape))
        start_all_gather(parts.view(-1), counts.view(-1), self.group).wait()
        whole = in_order(parts.flatten(2)).view(2 * self.size, *counts.shape[1:])
        before = whole.cumsum(0, dtype=whole.dtype) - whole
        return whole.sum(0), torch.stack([before[number] for number in self.chunks])


class GatheredKeys:
    """All-gathered keys and values of a sequence (Grattafiori et al. 2024, section 3.3.2)."""

    def __init__(self, part: Tensor, region: ContextRegion) -> None:
        """Hold this rank's keys and values `part` [2, batch, heads, sequence / ranks, head size]."""
        self.part, self.region = part, region

    def __iter__(self) -> Iterator[tuple[int | None, Tensor]]:
        """Yield None, for all ranks, and the keys and values [2, batch, heads, sequence, head size]."""
        whole = self.part.new_empty((self.region.size, *self.part.shape))
        start_all_gather(whole.view(-1), self.part.view(-1), self.region.group).wait()
        yield None, in_order(whole)

    def reduce_grad(self, gradient: Tensor) -> None:
        """Reduce-scatter the gradient of the keys and values that were yielded last."""
        whole = by_rank(gradient.to(self.part.dtype), self.region.size)
        self._sum = torch.empty_like(self.part)
        start_reduce_scatter(self._sum.view(-1), whole.view(-1), self.region.group).wait()

    def grad(self) -> Tensor:
        """Return the gradient of `part`, summed over the ranks, after the last `reduce_grad`."""
        return self._sum


class RingKeys:
    """Ring of keys and values: while a rank computes with one shard it receives the next (Liu et al. 2023).

    Gradients are sent straight to the rank that owns the keys, each rounded once, while the next ones are computed.
    """

    def __init__(self, part: Tensor, region: ContextRegion) -> None:
        """Hold this rank's keys and values `part` [2, batch, heads, sequence / ranks, head size]."""
        self.part, self.region = part, region
        self._step = 0
        self._sum: Tensor | None = None
        self._arriving: tuple[Tensor, Handle] | None = None

    def __iter__(self) -> Iterator[tuple[int | None, Tensor]]:
        """Yield each rank, counting down from this one, and its keys and values (shaped as `part`)."""
        # four ranks     step 0    1    2    3
        # rank 1 has          1    0    3    2      keys of these
        # and sends           1    0    3           to rank 2
        now, (rank, size) = self.part, (self.region.rank, self.region.size)
        for self._step in range(size):
            following = None
            if self._step + 1 < size:
                following = torch.empty_like(now)
                handle = _start_shift(following, now, self.region.stride, self.region.group)
            yield (rank - self._step) % size, now
            if following is not None:
                handle.wait()
                now = following

    def reduce_grad(self, gradient: Tensor) -> None:
        """Send the gradient of the keys and values that were yielded last to the rank that owns them."""
        if self._sum is None:  # the first shard is this rank's own
            self._sum = gradient
            return
        sent = gradient.to(self.part.dtype)
        received = torch.empty_like(sent)
        handle = _start_shift(received, sent, -self._step * self.region.stride, self.region.group)
        self._add()
        self._arriving = received, handle

    def grad(self) -> Tensor:
        """Return the gradient of `part`, summed over the ranks, after the last `reduce_grad`."""
        self._add()
        assert self._sum is not None
        return self._sum

    def _add(self) -> None:
        if self._arriving is not None:
            received, handle = self._arriving
            handle.wait()
            assert self._sum is not None
            self._sum += received
            self._arriving = None


def _start_shift(received: Tensor, sent: Tensor, by: int, group: AxisGroup | None) -> Handle:
    """Start to send a contiguous tensor to the rank `by` positions ahead, and to receive from the rank `by` behind."""
    assert group is not None
    rank, size = dist.get_rank(group.process_group), group.size
    come, go = ([sent.numel() * (peer == (rank + way) % size) for peer in range(size)] for way in (-by, by))
    return start_exchange(received.view(-1), sent.view(-1), come, go, group)


def _to_heads(x: Tensor, region: ContextRegion) -> Tensor:
    return in_order(exchange_rows(x.movedim(1, 0), region.group))


def _to_sequence(x: Tensor, region: ContextRegion) -> Tensor:
    return exchange_rows(by_rank(x, region.size), region.group).movedim(0, 1)


def to_heads(x: Tensor, region: ContextRegion) -> Tensor:
    """Exchange a shard of tokens with all heads for a shard of heads with all tokens (all-to-all; Jacobs et al. 2023).

    [batch, ranks, heads / ranks, sequence / ranks, size] -> [batch, heads / ranks, sequence, size].
    """
    return conjugate(x, region, _to_heads, _to_sequence)


def to_sequence(x: Tensor, region: ContextRegion) -> Tensor:
    """Exchange a shard of heads with all tokens for a shard of tokens with all heads: the inverse of `to_heads`."""
    return conjugate(x, region, _to_sequence, _to_heads)
