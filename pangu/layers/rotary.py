"""Rotary position embedding (Su et al. 2021, section 3.2): queries and keys turn by angles that grow with position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pangu.config.model import RopeScaling


class RotaryEmbedding:
    """Cosines and sines of a micro-batch, applied in every layer."""

    # Element i is paired with i + size / 2, as in GPT-NeoX and transformers' Llama; the paper pairs neighbors, which is
    # equivalent up to the order of rows of the query and key matrices.
    def __init__(
        self, positions: Tensor, size: int, base: float, dtype: torch.dtype, scaling: RopeScaling | None = None
    ) -> None:
        """Compute the angles position x base^(-2i / size) of each pair i, for int64 positions [batch, sequence]."""
        self.dtype = torch.promote_types(dtype, torch.float32)
        frequencies = rotary_frequencies(size, base, scaling, self.dtype, positions.device)
        angles = positions[:, None, :, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate [batch, heads, sequence, size] in fp32, and round once."""
        first, second = x.to(self.dtype).chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def rotary_frequencies(
    size: int,
    base: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return the radians per token of each pair of a head of width `size`: [size / 2]."""
    frequencies = base ** -(torch.arange(0, size, 2, dtype=dtype, device=device) / size)
    return frequencies if scaling is None else slowed(frequencies, scaling)


def slowed(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the radians per token of each pair, slowed as in Llama 3.1 (its released code, `apply_scaling`).

    A pair with few turns in the texts of pretraining has not met all its angles there: it turns `factor` times slower,
    within the angles it has met. One with many turns keeps its frequency. In between, the frequency is interpolated in
    the number of turns.
    """
    turns = scaling.original_sequence * frequencies / (2 * math.pi)
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, fast.clamp(0, 1))
