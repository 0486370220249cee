"""Sums of squares over sharded logical tensors: each element counts once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement


class Squares:
    """Adds up the sums of squares of the shards of a stage's logical tensors."""

    def __init__(self, placements: Sequence[Placement], mesh: Mesh, dtype: torch.dtype) -> None:
        """`placements`: all logical tensors of the stage in the same order on every rank of it; `dtype` of the sums."""
        self._mesh = mesh
        self._dtype = dtype
        self._place = {placement.name: place for place, placement in enumerate(placements)}
        self._cut = torch.tensor([placement.cut_dim is not None for placement in placements], device=mesh.device)

    def same(self, placements: Sequence[Placement], squares: Tensor) -> Tensor:
        """[..., shards] of this rank -> [..., shards] of the whole tensors: summed over the replicas that share a
        tensor, and over the tensor-parallel ranks where it is sharded."""
        places = [self._place[placement.name] for placement in placements]
        total = squares.new_zeros((*squares.shape[:-1], len(self._place)), dtype=self._dtype)
        total[..., places] = squares.to(self._dtype)
        all_reduce(total, self._mesh.group("shard"))
        if (tensor_group := self._mesh.group("tensor")) is not None:
            total = torch.where(self._cut, all_reduce(total.clone(), tensor_group), total)
        return total[..., places]


def counts(placement: Placement, layout: Layout, at: Coordinates) -> bool:
    """Whether a rank's shard counts in a sum over all ranks: it does on the first rank that holds it."""
    return (
        at.data < layout.shards
        and (placement.cut_dim is not None or at.tensor == 0)
        and (placement.shared is None or at.pipeline == 0)
    )


def norm_and_loss(gradients: list[Tensor], loss: Tensor | None, mesh: Mesh) -> tuple[float, float]:
    """Euclidean norm of the model's gradient (not finite if any element is not) and the sum of the losses, in one
    all-reduce. `gradients`: of the shards that count (see `counts`). `loss`: fp64 scalar, the sum of this replica's
    token losses; None on other stages."""
    both = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if gradients:
        both[0] = torch.stack(torch._foreach_norm(gradients)).square().double().sum()
    if loss is not None and mesh.at.tensor == 0:
        both[1] = loss
    squares, total = all_reduce(both, mesh.group("world")).tolist()
    return math.sqrt(squares), total


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor that clips a gradient of this norm to `limit` (Pascanu et al. 2013, Algorithm 1)."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
