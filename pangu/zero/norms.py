"""Sums of squares over logical tensors, wherever their parts are: each element counts once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.topology.placement import Placement
from pangu.zero.gradients import Groups


class Squares:
    """Adds up the sums of squares of what the ranks of a stage hold of each logical tensor."""

    def __init__(self, placements: Sequence[Placement], groups: Groups, device: torch.device) -> None:
        """
        Args:
            placements: all logical tensors of the stage in the same order on every rank of it.
            groups: who holds the other parts.
            device: where the sums are.
        """
        self._groups = groups
        self._place = {placement.name: place for place, placement in enumerate(placements)}
        self._cut = torch.tensor([placement.cut_dim is not None for placement in placements], device=device)

    def whole(self, placements: Sequence[Placement], squares: Tensor) -> Tensor:
        """[..., parts] of this rank's parts -> [..., all tensors of the stage], of the whole tensors.

        Parts are added up over the replicas that share a tensor, and over the tensor-parallel ranks where it is cut.
        """
        places = [self._place[placement.name] for placement in placements]
        total = squares.new_zeros((*squares.shape[:-1], len(self._place)))
        total[..., places] = squares
        all_reduce(total, self._groups.shard)
        if self._groups.tensor is None:
            return total
        return torch.where(self._cut, all_reduce(total.clone(), self._groups.tensor), total)

    def same(self, placements: Sequence[Placement], squares: Tensor) -> Tensor:
        """As `whole`, but of the given tensors only."""
        return self.whole(placements, squares)[..., [self._place[placement.name] for placement in placements]]


def global_norm(
    placements: Sequence[Placement],
    gradients: Sequence[Tensor],
    squares: Squares,
    counts: Tensor,
    pipeline: dist.ProcessGroup | None,
) -> Tensor:
    """Euclidean norm over all elements of the model, a scalar; not finite if any element is not.

    Args:
        placements: tensors that this rank holds a part of.
        gradients: those parts.
        squares: of the stage.
        counts: for every tensor of the stage 1, or 0 where another stage counts it.
        pipeline: the stages.
    """
    own = torch.stack(torch._foreach_norm(list(gradients))).square() if gradients else counts.new_zeros(0)
    # not by a product: 0 x inf would hide which stage is not finite
    total = torch.where(counts > 0, squares.whole(placements, own), 0.0).sum()
    return all_reduce(total, pipeline).sqrt()
