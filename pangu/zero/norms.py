"""Sums of squares over logical tensors, wherever their parts are: each element counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.topology.placement import Placement


def squares_over_ranks(
    placements: Sequence[Placement], group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """A function that turns sums of squares of this rank's slices [..., tensors] into those of the whole tensors.

    Slices are added up over `group`; tensors that every rank holds whole are left as they are.

    Args:
        placements: one for each tensor, in the order of the sums.
        group: tensor-parallel ranks.
        device: where the sums are.
    """
    if group is None:
        return lambda squares: squares
    cut = torch.tensor([placement.cut_dim is not None for placement in placements], device=device)
    return lambda squares: torch.where(cut, all_reduce(squares.clone(), group), squares)


def global_norm(gradients: Sequence[Tensor], over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Euclidean norm over all elements of the model, a scalar; not finite if any element is not.

    Args:
        gradients: this rank's slice of each logical tensor.
        over_ranks: from `squares_over_ranks` for the same tensors.
    """
    squares = torch.stack(torch._foreach_norm(list(gradients))).square()
    return over_ranks(squares).sum().sqrt()
