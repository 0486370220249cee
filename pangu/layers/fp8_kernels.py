"""Triton kernel of `pangu.layers.fp8`: a cast that reads its input once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast(
    x, scale, amax, rows, columns, sums, height, width, LIMIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Cast a tile of x [height, width] to `rows` and its transpose to `columns`, and raise `amax`, the bits of fp32.

    `sums` gets the sums over the tile's rows: the bias gradient without reading x again. None: not stored.
    """
    down, across = tl.program_id(0) // tl.cdiv(width, N), tl.program_id(0) % tl.cdiv(width, N)
    row, column = down * M + tl.arange(0, M), across * N + tl.arange(0, N)
    places, inside = row[:, None].to(tl.int64) * width + column[None, :], (row[:, None] < height) & (column < width)
    tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    # 0 for a finite number, otherwise nan
    value = tl.minimum(tl.maximum(tile * tl.load(scale), -LIMIT), LIMIT) + 0.0 * tile
    if rows is not None:
        tl.store(rows + places, value.to(rows.dtype.element_ty), mask=inside)
    if columns is not None:
        places = column[:, None].to(tl.int64) * height + row[None, :]
        tl.store(columns + places, tl.trans(value.to(columns.dtype.element_ty)), mask=tl.trans(inside))
    # as integers, in which magnitudes keep their order, below inf, below nan: a maximum in any order is the same
    tl.atomic_max(amax, tl.max(tl.max(tl.abs(tile).to(tl.int32, bitcast=True), 1), 0), sem="relaxed")
    if sums is not None:
        tl.store(sums + down.to(tl.int64) * width + column, tl.sum(tile, 0), mask=column < width)
