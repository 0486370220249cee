"""Initial weights as a function of (seed, tensor name, tile), never of the layout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from pangu.topology.copy_stream import host_memory
from pangu.topology.placement import Placement
from pangu.topology.random import generator, random_key

TILE = 128
"""Edge of the square tiles that are drawn one by one, so that any slice of a matrix can be drawn without the rest."""
BAND = 2**22
"""Elements drawn at a time for a device, or one row of tiles: bounds the host memory beside the tensor."""


@torch.no_grad()
def fill(tensor: Tensor, placement: Placement, seed: int, offsets: tuple[int, ...] | None = None) -> None:
    """Write initial values into `tensor`, a rectangle of a logical tensor on any device and in any float format, whose
    first element has the global index `offsets` (None: this rank's slice). A vector is a matrix of one column."""
    if placement.std is None:
        tensor.fill_(placement.constant)
        return
    matrix = tensor.view(tensor.shape[0], -1)
    row, column = (*(offsets or placement.offsets), 0)[:2]
    if matrix.device.type == "cpu" and matrix.dtype == torch.float32:
        draw(matrix, placement, seed, row, column)
        return
    stop, band = row + matrix.shape[0], max(1, BAND // (TILE * matrix.shape[1])) * TILE
    for top in range(row // TILE * TILE, stop, band):
        low, high = max(top, row), min(top + band, stop)
        # the next band is drawn while this one is copied: page-locked memory is not given out again before that is done
        values = host_memory((high - low) * matrix.shape[1], torch.float32, tensor.device).view(high - low, -1)
        draw(values, placement, seed, low, column)
        matrix[low - row : high - row].copy_(values, non_blocking=True)


def draw(values: Tensor, placement: Placement, seed: int, row: int, column: int) -> None:
    """Write the normal values from the global index (row, column) on into `values`, a matrix in fp32 on the CPU, by as
    many threads as torch uses."""
    block, std = values.numpy(), np.float32(placement.std)
    stop, end = row + block.shape[0], column + block.shape[1]
    tops, lefts = range(row // TILE * TILE, stop, TILE), range(column // TILE * TILE, end, TILE)
    tiles = iter([(top, left) for top in tops for left in lefts])  # shared: each thread takes the next one

    def draw_tiles() -> None:
        tile, source = np.empty((TILE, TILE), np.float32), generator()
        # a new key in the first state makes a new generator, in a tenth of the time, in which no other thread runs
        state = source.bit_generator.state
        for top, left in tiles:
            state["state"]["key"][0] = random_key(seed, placement.name, top // TILE, left // TILE)
            source.bit_generator.state = state
            # whole tiles are drawn even at the border, so that a tile's numbers do not depend on the tensor's size
            source.standard_normal(out=tile, dtype=np.float32)
            low, high, near, far = max(top, row), min(top + TILE, stop), max(left, column), min(left + TILE, end)
            part = tile[low - top : high - top, near - left : far - left]
            np.multiply(part, std, out=block[low - row : high - row, near - column : far - column])

    workers = min(torch.get_num_threads(), len(tops) * len(lefts))
    if workers == 1:
        draw_tiles()
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: draw_tiles(), range(workers)))


def replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> nn.Parameter:
    """Replace the parameter of this (dotted) name by one with the storage of `tensor`, and return it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    parameter = nn.Parameter(tensor)
    setattr(owner, name.rpartition(".")[2], parameter)
    return parameter
