"""Near-duplicate detection with MinHash and locality-sensitive hashing.

Sources: Broder 1997; Leskovec, Rajaraman & Ullman, "Mining of Massive Datasets", section 3.4.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError

_HASHES = 128
_SHINGLE = 8  # characters per shingle; the similarity of two documents is the share of shingles they have in common
_SPACE = re.compile(r"\s+")


@cache
def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return (bands, hashes per band) that find documents of shingle similarity `threshold` with probability 1/2."""
    pairs = [(_HASHES // rows, rows) for rows in range(1, _HASHES + 1)]
    return min(pairs, key=lambda pair: abs((1 - 0.5 ** (1 / pair[0])) ** (1 / pair[1]) - threshold))


def bands_of(text: str, threshold: float) -> NDArray[np.int64]:
    """Return a key per MinHash band, [bands]; texts sharing one are near duplicates. Raises UserError without rensa."""
    try:
        from rensa import RMinHash  # noqa: PLC0415 - optional package
    except ImportError as error:
        fix = "pip install rensa (or this package's extra: preprocess)"
        raise UserError(f"finding near duplicates needs the package rensa; {fix}") from error
    text = _SPACE.sub(" ", text).lower()
    sketch = RMinHash(num_perm=_HASHES, seed=1)
    sketch.update([text[begin : begin + _SHINGLE] for begin in range(max(len(text) - _SHINGLE, 0) + 1)])
    bands, rows = bands_and_rows(threshold)
    values = np.array(sketch.digest()[: bands * rows], dtype=np.uint64).reshape(bands, rows)
    keys = np.arange(1, bands + 1, dtype=np.uint64)  # equal hashes in different bands give different keys
    for column in values.T:
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys.view(np.int64)
