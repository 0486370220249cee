"""Which part of a sequence a rank has in context parallelism.

A query sees the keys before it, so the end of a sequence is more work than its beginning. The sequence is cut in twice
as many chunks as there are ranks, and each rank has one from either end (zig-zag; Grattafiori et al. 2024, section
3.3.2):

    ranks    chunks of the sequence
    1        0 1
    2        0 3 | 1 2
    4        0 7 | 1 6 | 2 5 | 3 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ContextRank:
    """A rank of those that share a sequence."""

    rank: int
    size: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Its chunks, of 2 x `size`."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Its part of what lies along the sequence in dimension `dim`."""
        chunks = whole.chunk(2 * self.size, dim)
        return torch.cat([chunks[number] for number in self.chunks], dim)


def in_order(parts: Tensor) -> Tensor:
    """[ranks, ..., sequence / ranks, width], the parts of all ranks -> [..., sequence, width]."""
    early, late = parts.chunk(2, -2)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_rank(whole: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`, contiguous."""
    early, late = whole.unflatten(-2, (2 * ranks, -1)).movedim(-3, 0).chunk(2)
    return torch.cat([early, late.flip(0)], -2)
