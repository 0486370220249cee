"""Rotary position embedding (Su et al. 2021, section 3.2): queries and keys turn by angles that grow with position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pangu.config.model import ModelConfig
from pangu.config.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


class RotaryEmbedding:
    """Cosines and sines of a micro-batch, applied in every layer."""

    # Element i is paired with i + size / 2 of the `size` that rotate, as in GPT-NeoX and transformers' Llama; the paper
    # pairs neighbors, which is equivalent up to the order of rows of the query and key matrices.
    def __init__(self, positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> None:
        """Compute the angles position x base^(-2i / size) of each pair i, for int64 positions [batch, sequence]."""
        self.dtype, self.size = torch.promote_types(dtype, torch.float32), config.rotary_size
        scaling = config.rope_scaling
        frequencies = rotary_frequencies(self.size, config.rotary_base, scaling, self.dtype, positions.device)
        angles = positions[:, None, :, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        if isinstance(scaling, YarnScaling):
            factor = yarn_attention_factor(scaling)
            self.cos, self.sin = self.cos * factor, self.sin * factor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first elements of heads [batch, heads, sequence, head size] in fp32, and round once."""
        first, second = x[..., : self.size].to(self.dtype).chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        whole = torch.cat(rotated, dim=-1).to(x.dtype)
        return whole if self.size == x.shape[-1] else torch.cat([whole, x[..., self.size :]], dim=-1)


def rotary_frequencies(
    size: int,
    base: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return the radians per token of each pair of `size` elements: [size / 2]."""
    frequencies = base ** -(torch.arange(0, size, 2, dtype=dtype, device=device) / size)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, size, base, scaling)
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return the radians per token of each pair, slowed as in Llama 3.1 (its released code, `apply_scaling`).

    A pair with few turns in the texts of pretraining has not met all its angles there: it turns `factor` times slower,
    within the angles it has met. One with many turns keeps its frequency. In between, the frequency is interpolated in
    the number of turns.
    """
    turns = scaling.original_sequence * frequencies / (2 * math.pi)
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, fast.clamp(0, 1))


def _yarn(frequencies: Tensor, size: int, base: float, scaling: YarnScaling) -> Tensor:
    """Return the radians per token of each pair, slowed as in YaRN (Peng et al. 2023, section 3.2, and its code)."""

    def pair_with(turns: float) -> float:
        return size * math.log(scaling.original_sequence / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    pairs = torch.arange(size // 2, dtype=frequencies.dtype, device=frequencies.device)
    slow = ((pairs - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
    return torch.lerp(frequencies, frequencies / scaling.factor, slow)


def attention_scale(scaling: RopeScaling | None) -> float:
    """Return the factor of attention scores in DeepSeek's released code, which YaRN has for rotated elements only."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def yarn_attention_factor(scaling: YarnScaling) -> float:
    """Return the factor of rotated queries and keys (Peng et al. 2023, section 3.4: its square is their 1 / t)."""
    return 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor
