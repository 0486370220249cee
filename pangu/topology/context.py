"""Zig-zag split of a sequence over context-parallel ranks.

With causal attention a query sees only earlier keys, so the end of a sequence is more work than its beginning. The
sequence is split into twice as many chunks as there are ranks, and each rank holds one from either end (Grattafiori et
al. 2024, section 3.3.2):

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
    """Position of a rank in its context-parallel group."""

    rank: int
    size: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Return the indices of this rank's two chunks, out of 2 * `size` chunks of the sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's two chunks of the full sequence in `whole`, which runs along dimension `dim`."""
        chunks = whole.chunk(2 * self.size, dim)
        return torch.cat([chunks[number] for number in self.chunks], dim)


def in_order(parts: Tensor) -> Tensor:
    """Reorder the shards of all ranks [ranks, ..., sequence / ranks, width] to the sequence [..., sequence, width]."""
    early, late = parts.chunk(2, -2)
    return torch.cat([early, late.flip(0)]).movedim(0, -3).flatten(-3, -2)


def by_rank(whole: Tensor, ranks: int) -> Tensor:
    """Reorder a sequence [..., sequence, width] to contiguous shards [ranks, ...]: the inverse of `in_order`."""
    early, late = whole.unflatten(-2, (2 * ranks, -1)).movedim(-3, 0).chunk(2)
    return torch.cat([early, late.flip(0)], -2)
