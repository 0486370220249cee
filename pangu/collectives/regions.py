"""Conjugate collectives of tensor and sequence parallelism: each one's backward pass is its partner.

Shoeybi et al. 2019, section 3 (copy and reduce); Korthikanti et al. 2022, section 4.2 (gather and reduce-scatter). All
are the identity on one rank. Sequences lie along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.conjugate import conjugate
from pangu.collectives.exchange import exchange_rows
from pangu.collectives.reduce import Handle, start_all_gather, start_all_reduce, start_reduce_scatter
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from pangu.topology.recorder import AxisGroup


@dataclass(frozen=True)
class TensorRegion(TensorRank):
    """Tensor-parallel group and this rank's position in it."""

    group: AxisGroup | None = None
    chunks: int = 1
    """Number of chunks of a matmul, so that communication overlaps computation; fewer for short sequences."""

    @classmethod
    def of(cls, mesh: Mesh, chunks: int = 1) -> TensorRegion:
        """Return the region of a mesh."""
        return cls(mesh.at.tensor, mesh.layout.tensor, mesh.layout.sequence, mesh.group("tensor"), chunks)

    def local_sequence(self, x: Tensor) -> Tensor:
        """Return this rank's slice of `x` [sequence, ...] under sequence parallelism, else `x`; not differentiable."""
        return x.chunk(self.size)[self.rank] if self.slices_sequence else x


def start_gather(x: Tensor, region: TensorRegion) -> Callable[[], Tensor]:
    """Start to all-gather [sequence / size, ...] under sequence parallelism; return a function that waits for it."""
    if not region.slices_sequence:
        return lambda: x
    whole = x.new_empty((x.shape[0] * region.size, *x.shape[1:]))
    handle = start_all_gather(whole.view(-1), x.contiguous().view(-1), region.group)
    return _result(whole, handle)


def start_sum(x: Tensor, region: TensorRegion) -> Callable[[], Tensor]:
    """Start to sum a contiguous [sequence, ...] over the ranks, in place or into this rank's [sequence / size, ...]."""
    # Under sequence parallelism each rank keeps only its slice of the sum: a reduce-scatter.
    if not region.slices_sequence:
        handle, total = start_all_reduce(x, region.group), x
    else:
        total = x.new_empty((x.shape[0] // region.size, *x.shape[1:]))
        handle = start_reduce_scatter(total.view(-1), x.view(-1), region.group)
    return _result(total, handle)


def _result(tensor: Tensor, handle: Handle) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        handle.wait()
        return tensor

    return wait


def _gather(x: Tensor, region: TensorRegion) -> Tensor:
    """Gather the sequence, or return a view without sequence parallelism: an output may not be the input itself."""
    return start_gather(x, region)() if region.slices_sequence else x.view_as(x)


def _sum(x: Tensor, region: TensorRegion) -> Tensor:
    x = x.contiguous()
    return start_sum(x if region.slices_sequence else x.clone(), region)()


def enter(x: Tensor, region: TensorRegion) -> Tensor:
    """Enter a tensor-parallel region: gather [sequence / size, ...] to [sequence, ...] if it is sharded."""
    # Ranks compute different outputs from the same input, so the backward pass sums over them.
    return x if region.size == 1 else conjugate(x, region, _gather, _sum)


def leave(x: Tensor, region: TensorRegion) -> Tensor:
    """Leave a tensor-parallel region by summing over the ranks: a reduce-scatter under sequence parallelism."""
    return x if region.size == 1 else conjugate(x, region, _sum, _gather)


def join_pieces(x: Tensor, ranks: int, region: TensorRegion) -> Tensor:
    """Join pieces [..., width / ranks] of `ranks` neighboring ranks that each use the whole [..., width]."""
    return x if ranks == 1 else conjugate(x, (ranks, region), _join_pieces, _sum_pieces)


def _join_pieces(x: Tensor, where: tuple[int, TensorRegion]) -> Tensor:
    # an all-gather would send every head to all ranks
    return exchange_rows(x.expand(where[0], *x.shape), where[1].group).movedim(0, -2).flatten(-2)


def _sum_pieces(x: Tensor, where: tuple[int, TensorRegion]) -> Tensor:
    return exchange_rows(x.unflatten(-1, (where[0], -1)).movedim(-2, 0), where[1].group).sum(0)


def gather_last(x: Tensor, region: TensorRegion) -> Tensor:
    """All-gather [..., width / size] to [..., width]; not differentiable."""
    if region.group is None:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(region.size)]
    dist.all_gather(parts, x.contiguous(), group=region.group.process_group)
    return torch.cat(parts, -1)
