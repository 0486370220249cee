"""Dropout masks of `pangu.layers.dropout_masks` for a tile of attention probabilities, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from pangu.layers import dropout_masks

GOLDEN = tl.constexpr(dropout_masks.GOLDEN)
FACTOR_0, FACTOR_1, FACTOR_2, FACTOR_3 = map(tl.constexpr, dropout_masks.FACTORS)


@triton.jit
def _words(columns):
    return (columns >> 5 << 3 | columns & 7) * GOLDEN


@triton.jit
def _factors(columns):
    low, high = (columns & 8) == 0, (columns & 16) == 0
    return tl.where(high, tl.where(low, FACTOR_0, FACTOR_1), tl.where(low, FACTOR_2, FACTOR_3))


@triton.jit
def _mixed(low, high, words):
    mixed = (low ^ words) * high
    return mixed ^ (mixed >> 16)


@triton.jit
def kept_by_queries(low, high, first, bound, WORDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return which keys from place `first` on are kept, [M, N], from halves of the queries' row keys."""
    # `WORDS`: `first` and `N` are multiples of the columns of 8 words
    if WORDS:
        words = (first >> 2) * GOLDEN + tl.arange(0, N // 4) * GOLDEN
        mixed = _mixed(low[:, None], high[:, None], words[None, :])
        mixed = tl.join(tl.join(mixed * FACTOR_0, mixed * FACTOR_2), tl.join(mixed * FACTOR_1, mixed * FACTOR_3))
        mixed = tl.permute(tl.reshape(mixed, (M, N // 32, 8, 2, 2)), (0, 1, 3, 4, 2))
        mixed = tl.reshape(mixed, (M, N))
    else:
        columns = first + tl.arange(0, N)
        mixed = _mixed(low[:, None], high[:, None], _words(columns)[None, :]) * _factors(columns)[None, :]
    return mixed >= bound


@triton.jit
def kept_by_keys(low, high, first, bound, WORDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the transposed result, [N, M], of `kept_by_queries`."""
    if WORDS:
        columns = tl.arange(0, N // 2)
        columns = first + (columns >> 3 << 4 | columns & 7)
        mixed = _mixed(low[None, :], high[None, :], _words(columns)[:, None])
        factors = tl.reshape(_factors(first + tl.arange(0, N)), (N // 16, 2, 8, 1))
        mixed = tl.reshape(tl.reshape(mixed, (N // 16, 1, 8, M)) * factors, (N, M))
    else:
        columns = first + tl.arange(0, N)
        mixed = _mixed(low[None, :], high[None, :], _words(columns)[:, None]) * _factors(columns)[:, None]
    return mixed >= bound
