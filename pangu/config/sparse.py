"""The configuration of block-sparse attention: which blocks of earlier tokens a block of tokens sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pangu.config.bounds import Count, Length, Natural


@dataclass(frozen=True)
class FixedSparsity:
    """A block sees its own group of neighbouring blocks, and the last blocks of every group before it (Child et al.
    2019, section 4.3, both of whose patterns each head has)."""

    kind: Literal["fixed"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Blocks in a group."""
    global_blocks: Count
    """Blocks at the end of a group that all later groups see."""


@dataclass(frozen=True)
class StridedSparsity:
    """A block sees the latest blocks, and every so many-th before it (Child et al. 2019, section 4.3, both of whose
    patterns each head has)."""

    kind: Literal["strided"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Latest blocks, its own among them."""
    stride: Count
    """Blocks from one that is seen to the next."""


@dataclass(frozen=True)
class BigBirdSparsity:
    """A block sees the latest blocks, the first ones of the text, and some that are drawn among the others before it
    (Zaheer et al. 2020, section 2, the part that is causal)."""

    kind: Literal["bigbird"]
    """Selects the pattern."""
    block: Length
    """Tokens in a block; FlexAttention computes tiles of 128 x 128 scores, whole or not at all."""
    local_blocks: Count
    """Latest blocks, its own among them."""
    global_blocks: Natural
    """First blocks, which all see."""
    random_blocks: Natural
    """Blocks that are drawn for each block, the same in all layers and heads."""
    seed: int
    """What is drawn is a function of this and the number of the block."""


SparseConfig = FixedSparsity | StridedSparsity | BigBirdSparsity
"""A pattern."""
