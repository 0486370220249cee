"""Data order as pure functions of keys: nothing is stored, so looking up any sample of any epoch costs the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from typing import Generic, TypeVar

from pangu.topology.random import random_key

ORDER_VERSION = 2
"""Version of the data order; changes when the same seed, weights and sample number select a different sample."""

Item = TypeVar("Item")
Turn = tuple[int, int, int]
"""Shuffled position of a document: epoch, tokens of the epoch read before it is due, document number in the epoch."""

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(index: int, size: int, *keys: object) -> int:
    """Return the image of `index` under a pseudorandom permutation of range(size) selected by the keys.

    A balanced Feistel network over the smallest even number of bits that holds `size`, applied until the value is in
    range (Black & Rogaway 2002, "Ciphers with arbitrary finite domains", section 5): at most four times on average.
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
    """Apply SplitMix64's finalizer (Steele, Lea & Flood 2014): each input bit affects every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


class Blend:
    """Assignment of samples to datasets: each has floor(n w) or ceil(n w) of the first n, for its weight share w.

    This is the quota method of apportionment (Balinski & Young 1975, "The quota method of apportionment"): among the
    datasets that are not too early, c < n w, the one with the earliest deadline, (c + 1) / w, gets the sample, where c
    counts its samples so far. They prove both bounds for any weights and every n. It is earliest-deadline-first
    scheduling, with a release and a deadline for every sample of a dataset.

    No sample is assigned before its release, and one released before n - 1/w has its deadline before n. So the counts
    at n do not depend on how the samples before n - 1/w, for the smallest w, were assigned: a lookup can start there
    from any counts that add up. A lookup from scratch assigns that many samples; the next one assigns none.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Prepare for `weights`, which are finite, positive and used as exact rationals of the doubles."""
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self._total = sum(self._parts)
        self._settles = -(-self._total // min(self._parts))
        self._cursor = (0, tuple(0 for _ in weights))
        # Cache of (number of samples, count per dataset), replaced atomically because other threads read it

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the dataset of a sample and the index of the sample within that dataset."""
        counts = self.counts(sample)
        dataset = self._deal(sample, counts)
        self._cursor = (sample + 1, tuple(counts))
        return dataset, counts[dataset] - 1

    def first_sample(self, dataset: int, index: int) -> int:
        """Return the sample number at `index` within a dataset: the inverse of `locate`."""
        sample = index * self._total // self._parts[dataset]  # its release
        counts = self.counts(sample)
        while counts[dataset] <= index:
            self._deal(sample, counts)
            sample += 1
        return sample - 1

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each dataset has."""
        known, begun = self._cursor
        if known <= samples <= known + self._settles:
            counts = list(begun)
        else:
            known = max(0, samples - self._settles)
            counts = [known * part // self._total for part in self._parts]
            behind = [i for i, part in enumerate(self._parts) if known * part % self._total]
            for dataset in behind[: known - sum(counts)]:
                counts[dataset] += 1
        for sample in range(known, samples):
            self._deal(sample, counts)
        return counts

    def _deal(self, sample: int, counts: list[int]) -> int:
        # weights 3, 1, 1: sample 2 goes to dataset 1, since dataset 0 with 2 samples is early, 2 >= 3 * 3/5
        #
        #     sample    0  1  2  3  4  5
        #     dataset   0  0  1  0  2  0
        parts, total = self._parts, self._total
        chosen = -1
        for dataset, (part, count) in enumerate(zip(parts, counts, strict=True)):
            early = count * total >= (sample + 1) * part
            if not early and (chosen < 0 or (count + 1) * parts[chosen] < (counts[chosen] + 1) * part):
                chosen = dataset
        counts[chosen] += 1
        return chosen


class ShuffleBuffer(Generic[Item]):
    """Streaming shuffle that delays each document by a keyed pseudorandom number of tokens, at most `span`.

    The order depends only on document lengths and keys, not on how far ahead the text is read, so that resuming has to
    reread only the buffered documents. The buffer holds at most `span` tokens and one document. With a span of 60:

        document    0   1   2   3
        begins at   0  40  50  90
        delay      55   5  35   0
        turn       55  45  85  90     so the order is 1, 0, 2, 3
    """

    def __init__(self, span: int, *keys: object) -> None:
        """Prepare an empty buffer; a span of 0 keeps the documents in order."""
        self._span, self._keys = span, keys
        self._waiting: list[tuple[Turn, Item]] = []

    def turn(self, epoch: int, begin: int, number: int) -> Turn:
        """Return the turn of document `number` of an epoch, which starts after `begin` tokens of the epoch."""
        delay = random_key(*self._keys, epoch, number) * (self._span + 1) >> 64 if self._span else 0
        return epoch, begin + delay, number

    def push(self, turn: Turn, item: Item) -> None:
        """Add a document to the buffer."""
        heappush(self._waiting, (turn, item))

    def pop(self, epoch: int, read: int) -> tuple[Turn, Item] | None:
        """Return the next document once `read` tokens of an epoch have been read; None if more must be read first."""
        if not self._waiting or self._waiting[0][0][:2] > (epoch, read):
            return None
        return heappop(self._waiting)
