"""A model without a trainer: real parameters, and logical tensors cut out of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pangu.layers.initial import fill, replace_parameter
from pangu.topology.placement import Placement, PlacementTable


def materialise(
    model: nn.Module, table: PlacementTable, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """Give a model from the meta device real parameters, one by one, filled with their first values."""
    for name, parameter in list(model.named_parameters()):
        stored = torch.zeros(parameter.shape, dtype=dtype, device=device)
        for placement in table.stored_in(name):
            fill(logical_view(stored, placement), placement, seed)
        replace_parameter(model, name, stored)


def logical_view(stored: Tensor, placement: Placement) -> Tensor:
    """The part of a stored parameter (or of anything of its size) that holds the slice of one logical tensor."""
    flat = stored.view(-1)[placement.offset : placement.offset + placement.local_numel]
    return flat.view(placement.local_shape)
