"""Sums of squares over sharded logical tensors, in which each element counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.layers.apex import Norms
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement


class Squares:
    """Sums of squares of a stage's logical tensors over the ranks that hold their shards."""

    def __init__(self, placements: Sequence[Placement], mesh: Mesh, dtype: torch.dtype) -> None:
        """Prepare for the tensors of a stage, in the same order on all its ranks; `dtype` is that of the sums."""
        self._mesh = mesh
        self.dtype = dtype
        # experts that the layout splits come last, as other ranks share them
        placements = sorted(placements, key=lambda placement: placement.expert)
        self._place = {placement.name: place for place, placement in enumerate(placements)}
        num_dense, num = sum(not placement.expert for placement in placements), len(placements)
        spans = (("shard", slice(num_dense)), ("expert_shard", slice(num_dense, num)))
        self._sums = [(mesh.group(axis), span) for axis, span in spans if mesh.group(axis) and range(num)[span]]
        cut = [is_cut(placement, mesh.layout) for placement in placements]
        self._cut = torch.tensor(cut, dtype=torch.bool, device=mesh.device)

    def over(self, placements: Sequence[Placement]) -> Callable[[Tensor], Tensor]:
        """Return a function from squares [..., shards] of some of this rank's shards to those of the full tensors."""
        # It sums over the replicas that share a tensor, and over the tensor-parallel ranks that split it.
        device = self._mesh.device
        tensor_group = self._mesh.group("tensor")
        if not self._sums and tensor_group is None:
            return lambda squares: squares
        order = [self._place[placement.name] for placement in placements]
        places = torch.tensor(order, dtype=torch.int64, device=device)

        def add_up(squares: Tensor) -> Tensor:
            total = torch.zeros(*squares.shape[:-1], len(self._place), dtype=self.dtype, device=device)
            total.index_copy_(-1, places, squares.to(device, self.dtype))
            for group, span in self._sums:
                part = total[..., span]
                summed = all_reduce(part.contiguous(), group)
                if summed is not part:
                    part.copy_(summed)
            if tensor_group is not None:
                total = torch.where(self._cut, all_reduce(total.clone(), tensor_group), total)
            return total.index_select(-1, places).to(squares.device)

        return add_up


def is_cut(placement: Placement, layout: Layout) -> bool:
    """Return whether tensor-parallel ranks hold different slices of a tensor."""
    return placement.cut_dim is not None and not (placement.expert and layout.expert_tensor == 1)


def counts(placement: Placement, layout: Layout, at: Coordinates) -> bool:
    """Return whether a rank's shard counts in a sum over all ranks, as on the first rank that holds it."""
    if placement.shared is not None and at.pipeline != 0:
        return False
    if placement.expert:
        return ExpertLayout(layout).counts(at, is_cut(placement, layout))
    return layout.replica(at) < layout.shards and (is_cut(placement, layout) or at.tensor == 0)


def holders(layout: Layout, rank: int, expert: bool) -> list[int]:
    """Return the ranks that hold the same shards of tensors as `rank`, of experts or of the rest; the owner first."""
    return ExpertLayout(layout).peers(rank, "expert_copies") if expert else layout.peers(rank, "copies")


def counts_among(placement: Placement, layout: Layout, rank: int, surviving: Set[int]) -> bool:
    """Return whether a rank's shard counts, as in `counts`, among the `surviving` ranks."""
    ranks = holders(layout, rank, placement.expert)
    return rank == next((one for one in ranks if one in surviving), None) and counts(
        placement, layout, layout.coordinates(ranks[0])
    )


def norm_and_loss(
    gradients: list[Tensor],
    loss: Tensor | None,
    flags: Sequence[bool],
    mesh: Mesh,
    norms: Norms = torch._foreach_norm,
    losses: int = 1,
    more: Tensor | None = None,
) -> Tensor:
    """Return fp64 [1 + losses + flags + more], in one all-reduce.

    These are the gradient norm, the sums of `loss`, the numbers of raised flags, and the sums of `more`.
    """
    num_more = 0 if more is None else len(more)
    sums = torch.zeros(1 + losses + len(flags) + num_more, dtype=torch.float64, device=mesh.device)
    # Only shards that count (`counts`) are in `gradients`; a non-finite element makes the norm non-finite. `loss` is
    # the fp64 sum of this replica's token losses (or [losses] sums), and None on stages other than the last.
    if gradients:
        sums[0] = torch.stack(list(norms(gradients))).square().double().sum()
    if loss is not None and mesh.at.tensor == 0:
        sums[1 : 1 + losses] = loss
    for place, raised in enumerate(flags, start=1 + losses):
        if raised:
            sums[place].fill_(1.0)
    if more is not None:
        sums[-num_more:] = more
    all_reduce(sums, mesh.group("world"))
    sums[0].sqrt_()
    return sums
