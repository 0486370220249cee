"""Configuration of block-sparse attention: which earlier blocks of tokens a block attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pangu.config.bounds import Count, Length, Natural


@dataclass(frozen=True)
class FixedSparsity:
    """Pattern of a block's own group and the ends of earlier ones (Child et al. 2019, 4.3; both patterns per head)."""

    kind: Literal["fixed"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Blocks per group."""
    global_blocks: Count
    """Number of blocks at the end of a group that all later groups attend to."""


@dataclass(frozen=True)
class StridedSparsity:
    """Pattern of the latest blocks and every n-th one before (Child et al. 2019, 4.3; both patterns per head)."""

    kind: Literal["strided"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Latest blocks, its own included."""
    stride: Count
    """Distance in blocks between two attended ones."""


@dataclass(frozen=True)
class BigBirdSparsity:
    """Pattern of the latest, the first and some random blocks (Zaheer et al. 2020, section 2, its causal part)."""

    kind: Literal["bigbird"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Latest blocks, its own included."""
    global_blocks: Natural
    """Number of leading blocks that all blocks attend to."""
    random_blocks: Natural
    """Number of random blocks that a block attends to, the same in all layers and heads."""
    seed: int
    """Seed of the random blocks, which depend only on it and on the index of the block."""


SparseConfig = FixedSparsity | StridedSparsity | BigBirdSparsity
"""Sparsity pattern."""
