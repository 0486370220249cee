"""Conjugate collectives of tensor and sequence parallelism: what one does in forward its partner does in backward.

Shoeybi et al. 2019, section 3 (copy and reduce); Korthikanti et al. 2022, section 4.2 (gather and reduce-scatter). All
are the identity on one rank. Sequences lie along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.conjugate import conjugate
from pangu.collectives.reduce import Handle, start_all_gather, start_all_reduce, start_reduce_scatter
from pangu.topology.mesh import Algorithms, Mesh
from pangu.topology.placement import TensorRank
from pangu.topology.recorder import AxisGroup


@dataclass(frozen=True)
class TensorRegion(TensorRank):
    """A tensor-parallel group and this rank's place in it."""

    group: AxisGroup | None = None
    chunks: int = 1
    """Chunks of a matmul, which hide the communication of one behind the computation of another; fewer where the
    sequence is shorter."""
    algorithms: Algorithms = field(default_factory=Algorithms)

    @classmethod
    def of(cls, mesh: Mesh, chunks: int = 1) -> TensorRegion:
        at, layout = mesh.at, mesh.layout
        return cls(at.tensor, layout.tensor, layout.sequence, mesh.group("tensor"), chunks, mesh.algorithms)

    def local_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of `x` [sequence, ...] under sequence parallelism; all of it otherwise. Not differentiable:
        for ids."""
        return x.chunk(self.size)[self.rank] if self.slices_sequence else x


def start_gather(x: Tensor, region: TensorRegion) -> Callable[[], Tensor]:
    """Begin to all-gather [sequence / size, ...] to [sequence, ...], and return a function that waits for it; `x`
    itself without sequence parallelism."""
    if not region.slices_sequence:
        return lambda: x
    whole = x.new_empty((x.shape[0] * region.size, *x.shape[1:]))
    handle = start_all_gather(whole.view(-1), x.contiguous().view(-1), region.group, region.algorithms)
    return _result(whole, handle)


def start_sum(x: Tensor, region: TensorRegion) -> Callable[[], Tensor]:
    """Begin to sum a contiguous [sequence, ...] over the ranks, and return a function that waits for it: in place or,
    under sequence parallelism, this rank's slice [sequence / size, ...] of the sum."""
    if not region.slices_sequence:
        handle, total = start_all_reduce(x, region.group), x
    else:
        total = x.new_empty((x.shape[0] // region.size, *x.shape[1:]))
        handle = start_reduce_scatter(total.view(-1), x.view(-1), region.group, region.algorithms)
    return _result(total, handle)


def _result(tensor: Tensor, handle: Handle) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        handle.wait()
        return tensor

    return wait


def _gather(x: Tensor, region: TensorRegion) -> Tensor:
    """The gathered sequence; without sequence parallelism a view (an autograd function's output is not its input)."""
    return start_gather(x, region)() if region.slices_sequence else x.view_as(x)


def _sum(x: Tensor, region: TensorRegion) -> Tensor:
    x = x.contiguous()
    return start_sum(x if region.slices_sequence else x.clone(), region)()


def enter(x: Tensor, region: TensorRegion) -> Tensor:
    """Into a region where ranks compute different things from the same input: [sequence / size, ...] -> [sequence, ...]
    under sequence parallelism; otherwise the shape stays. Backward sums over the ranks."""
    return x if region.size == 1 else conjugate(x, region, _gather, _sum)


def leave(x: Tensor, region: TensorRegion) -> Tensor:
    """Out of it, summing over the ranks: [sequence, ...] -> [sequence / size, ...] under sequence parallelism;
    otherwise the shape stays."""
    return x if region.size == 1 else conjugate(x, region, _sum, _gather)


def gather_last(x: Tensor, region: TensorRegion) -> Tensor:
    """[..., width / size] -> [..., width]. Not differentiable: for results."""
    if region.group is None:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(region.size)]
    dist.all_gather(parts, x.contiguous(), group=region.group.process_group)
    return torch.cat(parts, -1)
