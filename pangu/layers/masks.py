"""Attention masks: the keys that a query may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pangu.layers.block_pattern import BlockPattern


@dataclass(frozen=True)
class AttentionMask:
    """Causal attention mask, optionally within documents, a sliding window and sparse blocks."""

    documents: Tensor | None = None
    """Document of each token, contiguous, int64 [batch, sequence]; None: one document."""
    window: int | None = None
    """Number of keys in the window (Beltagy et al. 2020, section 3.1, one-sided); None: all."""
    # documents may be empty, and none spans two rows
    bounds: Tensor | None = None
    """Document bounds in the flattened batch, int32, from 0 to batch x sequence; None: one document, or unknown."""
    # earlier documents change nothing, as if a text were generated alone
    sparse: BlockPattern | None = None
    """Blocks that a query sees, counted from the start of its document; None: all."""

    @property
    def is_plain_causal(self) -> bool:
        """True if the mask is causal and nothing else."""
        return self.documents is None and self.window is None and self.sparse is None

    def rule(self) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
        """Return FlexAttention's `mask_mod`: broadcastable int64 (row, head, query, key) -> seen; for all heads."""
        in_blocks = None if self.sparse is None else self.sparse.rule(self.documents)

        def sees(batch: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
            seen = key <= query
            if self.window is not None:
                seen = seen & (query - key < self.window)
            if self.documents is not None:
                seen = seen & (self.documents[batch, query] == self.documents[batch, key])
            if in_blocks is not None:
                seen = seen & in_blocks(batch, query, key)
            return seen

        return sees

    def dense(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return bool [batch or 1, 1, queries, keys]: True where a query sees a key, both given by their positions."""
        rows = 1 if self.documents is None else self.documents.shape[0]
        batch = torch.arange(rows, device=device)[:, None, None, None]
        query, key = (torch.arange(places.start, places.stop, device=device) for places in (queries, keys))
        return self.rule()(batch, None, query[:, None], key).expand(rows, 1, len(queries), len(keys))
