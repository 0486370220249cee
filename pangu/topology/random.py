"""Counter-based random numbers: every draw is a function of named keys, never of earlier draws.

A layout therefore cannot change them and there is no state to save: initial weights are keyed by (seed, name, tile),
the data order by (seed, epoch, sample), dropout by (seed, step, place) and a hash of each element.
"""

from __future__ import annotations

import hashlib

import numpy as np


def random_key(*parts: object) -> int:
    """Return a 64-bit key of the parts' text, in order; use integers and strings only."""
    # BLAKE2b gives the same key on every machine and in every Python version, unlike `hash`.
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: object) -> np.random.Generator:
    """Return a Philox generator (Salmon et al. 2011) seeded by `random_key(*parts)`."""
    return np.random.Generator(np.random.Philox(key=random_key(*parts)))
