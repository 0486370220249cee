"""What tests ask of indexed files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pangu.data.indexed import IndexedTokens


def document_lengths(indexed: IndexedTokens) -> NDArray[np.int64]:
    """Tokens of each document, [documents]."""
    stops = np.concatenate([[0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)])
    return np.diff(stops[indexed.document_index])
