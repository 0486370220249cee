"""The order of the data as pure functions of keys: nothing is stored, so any sample of any epoch costs the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pangu.topology.random import random_key

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(index: int, size: int, *keys: object) -> int:
    """Where a pseudorandom permutation of range(size), chosen by the keys, sends `index`.

    A balanced Feistel network over the smallest even number of bits that holds `size`, walked until it lands inside
    (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", section 5). At most four walks on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = random_key(*keys)
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(key + turn * _GOLDEN + right & _MASK64) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): every bit of the input moves every bit of the output."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


@dataclass(frozen=True)
class Blend:
    """A repeating pattern of datasets in which each appears in proportion to its weight."""

    pattern: NDArray[np.int64]
    """Dataset of each place, [period]."""
    ranks: NDArray[np.int64]
    """Number of earlier places of the same dataset in the pattern, [period]."""
    counts: NDArray[np.int64]
    """Places of each dataset in the pattern, [datasets]."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Dataset of a sample and its index within that dataset."""
        repeats, place = divmod(sample, len(self.pattern))
        dataset = int(self.pattern[place])
        return dataset, repeats * int(self.counts[dataset]) + int(self.ranks[place])

    def first_sample(self, dataset: int, index: int) -> int:
        """The sample that is `index` of `dataset`: the inverse of `locate`."""
        repeats, rank = divmod(index, int(self.counts[dataset]))
        return repeats * len(self.pattern) + int(np.flatnonzero(self.pattern == dataset)[rank])


def blend(weights: Sequence[float], period: int) -> Blend:
    """Spread datasets evenly over `period` places, in proportion to their weights (largest remainders).

    The pattern depends on the weights alone, so a longer run continues a shorter one.
    """
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * period
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: period - counts.sum()]] += 1
    # Place j of c wants to stand at (j + 1/2) / c of the period.
    wishes = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(wishes, kind="stable")
    return Blend(np.repeat(np.arange(len(counts)), counts)[order], ranks[order], counts)
