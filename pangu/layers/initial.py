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
"""Edge of the square tiles that are drawn independently, so that any slice of a matrix can be drawn by itself."""
BAND = 2**22
"""Number of elements drawn at a time for a device (at least a row of tiles), which bounds host memory."""


@torch.no_grad()
def fill(tensor: Tensor, placement: Placement, seed: int, offsets: tuple[int, ...] | None = None) -> None:
    """Initialize `tensor`, a rectangle of a logical tensor at the global index `offsets` (None: this rank's slice)."""
    # A vector is a matrix of one column; any device and float format will do.
    if placement.std is None:
        tensor.fill_(placement.constant)
        return
    matrix = tensor.view(tensor.shape[0], -1)
    row, column = (*(offsets or placement.offsets), 0)[:2]
    stop, band = row + matrix.shape[0], max(1, BAND // (TILE * matrix.shape[1])) * TILE
    for top in range(row // TILE * TILE, stop, band):
        low, high = max(top, row), min(top + band, stop)
        # draw the next band while this one is copied: pinned memory is not reused before the copy is done
        values = host_memory((high - low) * matrix.shape[1], torch.float32, tensor.device).view(high - low, -1)
        draw(values, placement, seed, low, column)
        matrix[low - row : high - row].copy_(values, non_blocking=True)


def draw(values: Tensor, placement: Placement, seed: int, row: int, column: int) -> None:
    """Fill the fp32 CPU matrix `values` with normal values from the global index (row, column) on, in parallel."""
    block, std = values.numpy(), np.float32(placement.std)
    stop, end = row + block.shape[0], column + block.shape[1]
    tops, lefts = range(row // TILE * TILE, stop, TILE), range(column // TILE * TILE, end, TILE)
    tiles = iter([(top, left) for top in tops for left in lefts])  # shared by the threads

    def draw_tiles() -> None:
        tile, source = np.empty((TILE, TILE), np.float32), generator()
        # resetting the key is ten times faster than a new generator, whose construction also blocks other threads
        state = source.bit_generator.state
        for top, left in tiles:
            state["state"]["key"][0] = random_key(seed, placement.name, top // TILE, left // TILE)
            source.bit_generator.state = state
            # draw full tiles even at the border, so that a tile's values do not depend on the tensor's size
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
