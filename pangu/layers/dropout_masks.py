"""Dropout masks from a hash of (seed, step, place, sample, position, element), equal on every device.

An element is dropped if a 32-bit integer is below a bound. The integer comes from two 64-bit keys: one of place and
step, computed on the host, and one of the row (sample, position), computed once for all places. Columns that differ in
bits 3 and 4 only share a word, from which each gets its integer by a factor of its own: a GPU's thread holds their
attention probabilities together, and computes the word once. In arithmetic that wraps around:

    row key    = splitmix64's finalizer (Steele et al. 2014, figure 16) of 2^32 sample + position
    (a, b)     = low and high half of row key xor place key
    word       = 8 (column div 32) + column mod 8
    mixed      = (a xor 0x9E3779B1 word) (b | 1)
    mixed      = (mixed xor mixed >> 16) FACTORS[column div 8 mod 4]        >> keeps the sign

That is a finalizer of two multiplications, with a factor for each row, without steps that only decide lower bits. Two
factors F and G have a F + b G = 0 mod 2^32 only with |a b| > 10^7, so that columns of a word are nearly independent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.layers.fused import fused

# torch gives half as many to one thread; threads that meet after every small step only pay off beyond `_LARGE`.
_BLOCK = 1 << 16
"""Number of elements per CPU core at a time, whose temporaries fit its cache."""
_LARGE = 1 << 20


def signed(number: int, bits: int) -> int:
    """Return an unsigned integer as the signed one with the same bits."""
    return number - (number >> (bits - 1) << bits)


GOLDEN = signed(0x9E3779B1, 32)
FACTORS = 0x2C1B3C6D, 0x297A2D39, 0x7FEB352D, 0x31848BAB
COLUMNS = 32
"""Number of columns of 8 words."""
_SPLITMIX = signed(0xBF58476D1CE4E5B9, 64), signed(0x94D049BB133111EB, 64)


def _row_keys(like: Tensor, sample: Tensor | int, position: Tensor | int) -> Tensor:
    """Return int64 [m, n] for `like` [n, m]: keys of samples from `sample` and positions from `position` on."""
    samples, positions = (torch.arange(size, device=like.device) for size in like.shape)
    z = ((samples + sample) << 32) + (positions + position)[:, None]
    # >> keeps the sign, which the finalizer's does not
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _SPLITMIX[0]
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _SPLITMIX[1]
    return z ^ (z >> 31 & (1 << 33) - 1)


row_keys = fused(
    "row_keys(Tensor like, int sample, int position) -> Tensor",
    _row_keys,
    lambda like, sample, position: like.new_empty(like.shape[::-1], dtype=torch.int64),
)


def _halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    return keys.to(torch.int32), (keys >> 32).to(torch.int32) | 1


def _factors(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors, int32, by which columns change their row's key, and their word."""
    # from int64: a kernel that counts in int64 but calls it int32 would skip a conversion to int32
    words = ((columns >> 5 << 3 | columns & 7).to(torch.int64) * GOLDEN).to(torch.int32)
    low, high = ((columns & bit) == 0 for bit in (8, 16))
    pairs = torch.where(low, FACTORS[0], FACTORS[1]), torch.where(low, FACTORS[2], FACTORS[3])
    return words, torch.where(high, pairs[0], pairs[1]).to(torch.int32)


def _mix(
    low: Tensor, high: Tensor, factors: tuple[Tensor, Tensor], out: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Tensor:
    """Return int32 [..., width], in the first of `out` if given; both are overwritten."""
    memory, shifted = out
    mixed = torch.mul(torch.bitwise_xor(low, factors[0], out=memory), high, out=memory)
    mixed = torch.bitwise_xor(mixed, torch.bitwise_right_shift(mixed, 16, out=shifted), out=memory)
    return torch.mul(mixed, factors[1], out=memory)


def bound_of(probability: float) -> int:
    """Return the bound that a fraction `probability` of all 32-bit integers is below."""
    return round(probability * 2**32) - 2**31


def is_kept(rows: Tensor, columns: Tensor, probability: float) -> Tensor:
    """Return True where an element is kept, for broadcastable row keys xor the place key, and column numbers."""
    return _mix(*_halves(rows), _factors(columns)) >= bound_of(probability)


def _drop_in_blocks(
    x: Tensor, residual: Tensor | None, rows: Tensor, key: int, probability: float, first: int = 0
) -> Tensor:
    """Compute `drop` in steps that are fast on a CPU."""
    # Comparing into floats and multiplying by them takes a tenth of the time of filling by a mask.
    width, scale = x.shape[-1], 1.0 / (1.0 - probability)
    (low, high), factors = _halves((rows.reshape(-1) ^ key)[..., None]), _factors(torch.arange(first, first + width))
    threads = torch.get_num_threads()
    elements = _BLOCK // 2 if threads > 1 and x.numel() <= _LARGE else _BLOCK * threads
    size = min(max(1, elements // width), len(low))
    mixed, shifted = low.new_empty(2, size, width)
    keep_mask, out = x.new_empty(size, width), torch.empty_like(x, memory_format=torch.contiguous_format)
    matrices = (tensor.reshape(-1, width) for tensor in (out, x, x if residual is None else residual))
    for a, b, result, part, added in zip(*(matrix.split(size) for matrix in (low, high, *matrices)), strict=True):
        block = slice(len(a))
        torch.ge(_mix(a, b, factors, (mixed[block], shifted[block])), bound_of(probability), out=keep_mask[block])
        if residual is None:
            torch.mul(part, keep_mask[block], out=result).mul_(scale)
        else:
            torch.addcmul(added, part, keep_mask[block], value=scale, out=result)
    return out


def drop(
    x: Tensor, residual: Tensor | None, rows: Tensor, key: Tensor, probability: float, first: Tensor | int = 0
) -> Tensor:
    """Return `x` [..., columns] with some elements zeroed, the others scaled, plus `residual`."""
    # `rows` [...]: row keys; `first`: number of the first column
    memory = torch.empty_like(x, dtype=torch.int32), torch.empty_like(x, dtype=torch.int32)
    columns = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) + first
    keep_mask = _mix(*_halves((rows ^ key)[..., None]), _factors(columns), memory) >= bound_of(probability)
    scaled = torch.where(keep_mask, x * (1.0 / (1.0 - probability)), 0.0)
    return scaled if residual is None else residual + scaled


dropout = fused(
    "dropout(Tensor x, Tensor? residual, Tensor rows, int key, float probability, int first=0) -> Tensor",
    drop,
    lambda x, residual, rows, key, probability, first=0: torch.empty_like(x, memory_format=torch.contiguous_format),
    on_cpu=_drop_in_blocks,
)


class DropAndAdd(Function):
    """Dropout plus residual that saves keys only: the backward pass recomputes the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, rows: Tensor, key: int, probability: float) -> Tensor:
        """Return x with dropout, plus the residual."""
        ctx.mask = rows, key, probability
        return dropout(x, residual, *ctx.mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of x and residual."""
        x, residual = ctx.needs_input_grad[:2]
        dropped = dropout(grads[0], None, *ctx.mask) if x else None
        return dropped, grads[0] if residual else None, None, None, None
