"""Conjugate collectives of tensor and sequence parallelism: what one does in forward its partner does in backward.

Shoeybi et al. 2019, section 3 (copy and reduce); Korthikanti et al. 2022, section 4.2 (gather and reduce-scatter). All
functions are the identity on a region of one rank. Sequences lie along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.reduce import all_reduce, start_all_reduce
from pangu.topology.mesh import Mesh


@dataclass(frozen=True)
class TensorRegion:
    """The ranks that share every matrix, and this rank's place among them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    sequence: bool = False
    """Sequence parallelism: outside the matrices each rank holds 1 / size of the sequence."""

    @classmethod
    def of(cls, mesh: Mesh) -> TensorRegion:
        """The region of a live mesh."""
        return cls(mesh.at.tensor, mesh.layout.tensor, mesh.group("tensor"), mesh.layout.sequence)

    @property
    def slices_sequence(self) -> bool:
        """True if hidden states between the matrices are slices of the sequence."""
        return self.sequence and self.size > 1

    def bounds(self, length: int) -> tuple[int, int]:
        """This rank's [start, stop) of `length` items dealt in equal shares; the last shares may be short or empty."""
        share = -(-length // self.size)
        return min(self.rank * share, length), min((self.rank + 1) * share, length)

    def local_sequence(self, x: Tensor) -> Tensor:
        """The part of `x` [sequence, ...] that this rank holds under sequence parallelism; all of it otherwise. Not
        differentiable: for ids."""
        return x.chunk(self.size)[self.rank] if self.slices_sequence else x


def start_gather(x: Tensor, region: TensorRegion) -> tuple[Tensor, dist.Work]:
    """Begin to join the ranks' [sequence / size, ...] to [sequence, ...]; valid after `wait()`."""
    whole = x.new_empty((x.shape[0] * region.size, *x.shape[1:]))
    return whole, _named("all_gather_single", "all_gather_into_tensor")(
        whole, x.contiguous(), group=region.group, async_op=True
    )


def start_reduce_scatter(x: Tensor, region: TensorRegion) -> tuple[Tensor, dist.Work]:
    """Begin to sum [sequence, ...] over the ranks and keep this rank's slice; valid after `wait()`."""
    part = x.new_empty((x.shape[0] // region.size, *x.shape[1:]))
    call = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return part, call(part, x.contiguous(), group=region.group, async_op=True)


def _named(name: str, before: str) -> Callable[..., dist.Work]:
    """A function of torch.distributed under the name it has from torch 2.13 on, or under the one it had before."""
    return getattr(dist, name, None) or getattr(dist, before)


def _gather(x: Tensor, region: TensorRegion) -> Tensor:
    whole, work = start_gather(x, region)
    work.wait()
    return whole


def _reduce_scatter(x: Tensor, region: TensorRegion) -> Tensor:
    part, work = start_reduce_scatter(x, region)
    work.wait()
    return part


class _Enter(Function):
    """Forward: copy, or gather the sequence. Backward: all-reduce, or reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorRegion) -> Tensor:
        ctx.region = region
        return _gather(x, region) if region.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        region = ctx.region
        if region.sequence:
            return _reduce_scatter(grads[0], region), None
        return all_reduce(grads[0].contiguous().clone(), region.group), None


class _Leave(Function):
    """Forward: sum the ranks' parts, or reduce-scatter them. Backward: copy, or gather the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TensorRegion) -> Tensor:
        ctx.region = region
        return _reduce_scatter(x, region) if region.sequence else all_reduce(x.contiguous().clone(), region.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (_gather(grads[0], ctx.region) if ctx.region.sequence else grads[0]), None


class _ColumnProduct(Function):
    """y = x Wᵀ where every rank holds some rows of W [outputs / size, inputs].

    Saves the local slice of the sequence only and gathers it again in backward. Backward hides the gather of x behind
    the product for x's gradient, and the reduction of that gradient behind the product for W's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, region: TensorRegion) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(x, weight)
        return F.linear(_gather(x, region) if region.sequence else x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        region: TensorRegion = ctx.region
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        if region.sequence:
            whole, gathering = start_gather(x, region)
            total = grad @ weight
            gathering.wait()
            grad_x, reducing = start_reduce_scatter(total, region)
        else:
            whole, grad_x = x, grad @ weight
            started = start_all_reduce(grad_x, region.group)
            assert started is not None
            reducing = started
        grad_weight = grad.flatten(0, -2).t() @ whole.flatten(0, -2)
        reducing.wait()
        return grad_x, grad_weight, None


def enter(x: Tensor, region: TensorRegion) -> Tensor:
    """Into a part of the model where ranks compute different things from the same input.

    [sequence / size, ...] -> [sequence, ...] under sequence parallelism; otherwise the shape stays.
    """
    return x if region.size == 1 else _Enter.apply(x, region)


def leave(x: Tensor, region: TensorRegion) -> Tensor:
    """Out of it: the ranks' parts are summed.

    [sequence, ...] -> [sequence / size, ...] under sequence parallelism; otherwise the shape stays.
    """
    return x if region.size == 1 else _Leave.apply(x, region)


def column_product(x: Tensor, weight: Tensor, region: TensorRegion) -> Tensor:
    """`enter`, then x Wᵀ with this rank's rows of W, with the communication of backward hidden behind its products."""
    return F.linear(x, weight) if region.size == 1 else _ColumnProduct.apply(x, weight, region)


def gather_last(x: Tensor, region: TensorRegion) -> Tensor:
    """Join the ranks' [..., width / size] to [..., width]. Not differentiable: for results."""
    if region.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(region.size)]
    dist.all_gather(parts, x.contiguous(), group=region.group)
    return torch.cat(parts, -1)
