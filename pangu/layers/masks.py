"""Which keys a query may see."""

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
    """A query sees the keys at or before it in its document and in the window that ends with it."""

    documents: Tensor | None = None
    """int64 [batch, sequence], the document of each token, a run of neighbours; None: one document."""
    window: int | None = None
    """Keys in the window (Beltagy et al. 2020, section 3.1, to one side); None: all."""
    bounds: Tensor | None = None
    """int32, bounds of the documents in the flattened batch, from 0 to batch x sequence; a document may be empty, none
    spans two rows. None: one document, or not known."""
    sparse: BlockPattern | None = None
    """Blocks that a query sees, counted from the start of its document: what stands before it changes nothing, as when
    a text is generated alone. None: all."""

    @property
    def is_plain_causal(self) -> bool:
        return self.documents is None and self.window is None and self.sparse is None

    def rule(self) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
        """FlexAttention's `mask_mod`: (row, head, query, key), int64 tensors that broadcast -> whether the key is seen;
        the same for all heads."""
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

    def dense(self, length: int, device: torch.device, first: int = 0, stop: int | None = None) -> Tensor:
        """bool [batch or 1, 1, stop - first, sequence]: whether row (query, from `first` on; `stop` None: to the end)
        sees column (key)."""
        rows = 1 if self.documents is None else self.documents.shape[0]
        batch = torch.arange(rows, device=device)[:, None, None, None]
        keys = torch.arange(length, device=device)
        queries = keys[first:stop, None]
        return self.rule()(batch, None, queries, keys).expand(rows, 1, len(queries), length)
