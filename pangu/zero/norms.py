"""Sums of squares over logical tensors, wherever their parts are: each element counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.topology.placement import Placement
from pangu.zero.gradients import Groups
from pangu.zero.units import Piece


class Squares:
    """Adds up the sums of squares of what the ranks of a stage hold of each logical tensor."""

    def __init__(
        self, placements: Sequence[Placement], groups: Groups, device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            placements: all logical tensors of the stage in the same order on every rank of it.
            groups: who holds the other parts.
            device: where the sums are.
            dtype: of the sums, also on a rank that holds no part of anything.
        """
        self._groups = groups
        self._dtype = dtype
        self._place = {placement.name: place for place, placement in enumerate(placements)}
        self._cut = torch.tensor([placement.cut_dim is not None for placement in placements], device=device)

    def whole(self, placements: Sequence[Placement], squares: Tensor) -> Tensor:
        """[..., parts] of this rank's parts -> [..., all tensors of the stage], of the whole tensors.

        Parts are added up over the replicas that share a tensor, and over the tensor-parallel ranks where it is cut.
        """
        places = [self._place[placement.name] for placement in placements]
        total = squares.new_zeros((*squares.shape[:-1], len(self._place)), dtype=self._dtype)
        total[..., places] = squares.to(self._dtype)
        all_reduce(total, self._groups.shard)
        if self._groups.tensor is None:
            return total
        return torch.where(self._cut, all_reduce(total.clone(), self._groups.tensor), total)

    def same(self, placements: Sequence[Placement], squares: Tensor) -> Tensor:
        """As `whole`, but of the given tensors only."""
        return self.whole(placements, squares)[..., [self._place[placement.name] for placement in placements]]


def global_norm(
    pieces: Sequence[Piece], squares: Squares, counted: Tensor, pipeline: dist.ProcessGroup | None
) -> Tensor:
    """Euclidean norm of the gradient over all elements of the model, a scalar; not finite if any element is not.

    Args:
        pieces: what this rank updates.
        squares: of the stage.
        counted: for every tensor of the stage, whether this stage counts it.
        pipeline: the stages.
    """
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    own = torch.stack(torch._foreach_norm(gradients)).square() if gradients else torch.zeros(0, device=counted.device)
    whole = squares.whole([piece.placement for piece in pieces], own)
    return all_reduce(whole.where(counted, 0.0).sum(), pipeline).sqrt()
