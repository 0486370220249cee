"""Initial weights as a function of (seed, tensor name, tile), never of the layout (DESIGN, idea 6)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pangu.topology.placement import Placement, PlacementTable
from pangu.topology.random import generator

TILE = 128
"""Edge of the square tiles that are drawn one by one, so that any slice of a matrix can be drawn without the rest."""


def initial_rows(placement: Placement, seed: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor's first values.

    Returns:
        fp32 on the CPU, shape [stop - start, *placement.shape[1:]]; equal bit for bit to that part of the whole tensor.
    """
    shape = (stop - start, *placement.shape[1:])
    if placement.std is None:
        return torch.full(shape, placement.constant)
    columns = placement.shape[1]
    values = np.empty(shape, dtype=np.float32)
    for row in range(start // TILE * TILE, stop, TILE):
        low, high = max(row, start), min(row + TILE, stop)
        for column in range(0, columns, TILE):
            # whole tiles are drawn even at the border, so that a tile's numbers do not depend on the tensor's size
            tile = generator(seed, placement.name, row // TILE, column // TILE).standard_normal(
                (TILE, TILE), np.float32
            )
            width = min(TILE, columns - column)
            values[low - start : high - start, column : column + width] = tile[low - row : high - row, :width]
    return torch.from_numpy(values).mul_(placement.std)


@torch.no_grad()
def fill(tensor: Tensor, placement: Placement, seed: int) -> None:
    """Write the first values of `placement` into `tensor` (its global shape; any device and float format)."""
    band = 16 * TILE  # bounds the host memory beside the tensor
    for start in range(0, placement.shape[0], band):
        stop = min(start + band, placement.shape[0])
        tensor[start:stop].copy_(initial_rows(placement, seed, start, stop))


def replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> nn.Parameter:
    """Make `tensor` the storage of the parameter called `name` (dotted) and return the new parameter."""
    owner = model.get_submodule(name.rpartition(".")[0])
    parameter = nn.Parameter(tensor)
    setattr(owner, name.rpartition(".")[2], parameter)
    return parameter


def materialise(
    model: nn.Module, table: PlacementTable, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """Give a model from the meta device real parameters, one by one, filled with their first values."""
    for name, parameter in list(model.named_parameters()):
        stored = torch.empty(parameter.shape, dtype=dtype, device=device)
        for placement in table.stored_in(name):
            fill(logical_view(stored, placement), placement, seed)
        replace_parameter(model, name, stored)


def logical_view(stored: Tensor, placement: Placement) -> Tensor:
    """The part of a stored parameter (or of anything of its shape) that one logical tensor occupies."""
    return stored.view(-1)[placement.offset : placement.offset + placement.numel].view(placement.shape)
