"""Initial weights as a function of (seed, tensor name, tile), never of the layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pangu.topology.placement import Placement
from pangu.topology.random import generator

TILE = 128
"""Edge of the square tiles that are drawn one by one, so that any slice of a matrix can be drawn without the rest."""


def initial_block(placement: Placement, seed: int, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """The block rows x columns (each [start, stop)) of a matrix's initial values; fp32 on the CPU, equal bit for bit to
    that part of the whole tensor. A vector is a matrix of one column."""
    shape = (rows[1] - rows[0], columns[1] - columns[0])
    if placement.std is None:
        return torch.full(shape, placement.constant)
    values = np.empty(shape, dtype=np.float32)
    for top in range(rows[0] // TILE * TILE, rows[1], TILE):
        for left in range(columns[0] // TILE * TILE, columns[1], TILE):
            # whole tiles are drawn even at the border, so that a tile's numbers do not depend on the tensor's size
            key = (seed, placement.name, top // TILE, left // TILE)
            tile = generator(*key).standard_normal((TILE, TILE), np.float32)
            low, high = max(top, rows[0]), min(top + TILE, rows[1])
            near, far = max(left, columns[0]), min(left + TILE, columns[1])
            into = values[low - rows[0] : high - rows[0], near - columns[0] : far - columns[0]]
            into[:] = tile[low - top : high - top, near - left : far - left]
    return torch.from_numpy(values).mul_(placement.std)


@torch.no_grad()
def fill(tensor: Tensor, placement: Placement, seed: int, offsets: tuple[int, ...] | None = None) -> None:
    """Write initial values into `tensor`, a rectangle of a logical tensor on any device and in any float format, whose
    first element has the global index `offsets` (None: this rank's slice)."""
    matrix = tensor.view(tensor.shape[0], -1)
    first_row, first_column = (*(offsets or placement.offsets), 0)[:2]
    columns = (first_column, first_column + matrix.shape[1])
    band = 16 * TILE  # bounds the host memory beside the tensor
    for start in range(0, matrix.shape[0], band):
        stop = min(start + band, matrix.shape[0])
        matrix[start:stop].copy_(initial_block(placement, seed, (first_row + start, first_row + stop), columns))


def replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> nn.Parameter:
    """Replace the parameter of this (dotted) name by one with the storage of `tensor`, and return it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    parameter = nn.Parameter(tensor)
    setattr(owner, name.rpartition(".")[2], parameter)
    return parameter
