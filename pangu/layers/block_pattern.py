"""Mask of block-sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.config.sparse import SparseConfig
from pangu.layers.sparse import blocks_seen


@dataclass(frozen=True)
class BlockPattern:
    """Pattern of block-sparse attention."""

    seen: Tensor
    """True where a block (row) sees a block (column), bool [blocks, blocks], for the longest text."""
    size: int
    """Number of tokens per block."""

    @classmethod
    def of(cls, config: SparseConfig, length: int, device: torch.device) -> BlockPattern:
        """Return the pattern for texts of up to `length` tokens."""
        count = -(-length // config.block)
        rows = [[key in seen for key in range(count)] for seen in (blocks_seen(config, row) for row in range(count))]
        return cls(torch.tensor(rows, dtype=torch.bool, device=device), config.block)

    def rule(self, documents: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function of broadcastable int64 (row, query, key) -> True if the query's block sees the key's."""
        # counted from the starts of their documents (see `AttentionMask`)
        seen, size, begins = self.seen, self.size, None if documents is None else _begins(documents)

        def sees(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if begins is not None:
                query, key = query - begins[batch, query], key - begins[batch, key]
            return seen[query // size, key // size]

        return sees


def _begins(documents: Tensor) -> Tensor:
    """Return the start of each token's document, int64 [batch, sequence]."""
    places = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, 1:] == documents[:, :-1]
    return F.pad(torch.where(same, 0, places[1:]), (1, 0)).cummax(1).values
