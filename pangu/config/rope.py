"""Configuration of rotary positions in texts that are longer than those of pretraining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Length, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): all pairs turn slower."""

    name: Literal["linear"]
    """Selects it."""
    factor: Annotated[float, Bounds(least=1)]
    """Slowdown factor."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, sections 3.2 to 3.4): slows down slow pairs, and sharpens attention."""

    name: Literal["yarn"]
    """Selects it."""
    factor: Annotated[float, Bounds(least=1)]
    """Slowdown factor of pairs with at most `beta_slow` turns in the original texts."""
    original_sequence: Length
    """Tokens in a pretraining sample."""
    beta_fast: Positive = 32.0
    """Number of turns in `original_sequence` tokens from which a pair keeps its speed."""
    beta_slow: Positive = 1.0
    """Number of turns up to which a pair is slowed; in between, the frequency is interpolated over the pair's index."""
    truncate: bool = True
    """Round the indices of these two pairs outward."""
    attention_factor: Positive | None = None
    """Factor of rotated queries and of rotated keys; null means 0.1 ln(`factor`) + 1."""
    mscale_all_dim: NotNegative = 0.0
    """With `model.latent`, factor of all attention scores: the square of 0.1 x this x ln(`factor`) + 1 (DeepSeek's
    released code)."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's RoPE for longer texts (Grattafiori et al. 2024, section 3.4.2, and code): slows down slow pairs."""

    name: Literal["llama3"] = "llama3"
    """Selects it."""
    factor: Annotated[float, Bounds(least=1)]
    """Slowdown factor of pairs with fewer than `low_freq_factor` turns in the original texts."""
    low_freq_factor: Positive
    """Number of turns in `original_sequence` tokens up to which a pair is slowed."""
    high_freq_factor: Positive
    """Number of turns above which a pair keeps its speed; in between, the frequency is interpolated."""
    original_sequence: Length
    """Tokens in a pretraining sample."""


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling
