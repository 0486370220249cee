"""The order of the data as pure functions of keys: nothing is stored, so any sample of any epoch costs the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from pangu.topology.random import random_key

ORDER_VERSION = 2
"""Changes when the same seed, weights and sample number come to stand for another sample."""

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


class Blend:
    """Deals samples to datasets so that of the first n samples each dataset has floor(n w) or ceil(n w), for its share
    w of the weights and every n.

    This is the quota method of apportionment (Balinski & Young 1975, "The quota method of apportionment"): a sample
    goes to the dataset that must come soonest, at (c + 1) / w for one that has had c samples, of those that would not
    come too early, c < n w. They prove that both bounds hold for any weights. In the words of scheduling it is earliest
    deadline first, with a release and a deadline for every sample of a dataset.

    No sample is dealt before its release, and one that was released before n - 1/w has its deadline before n. So what
    is owed at n does not depend on how the samples before n - 1/w, for the smallest w, were dealt: any counts that add
    up will do to begin with. That many samples have to be dealt again to find a place from nothing, and none to find
    the next one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are finite, above 0 and taken as exactly the numbers that the doubles are."""
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self._total = sum(self._parts)
        self._settles = -(-self._total // min(self._parts))
        self._cursor = (0, tuple(0 for _ in weights))
        """A number of samples and how many of them each dataset has. Only saves time; replaced as a whole, so that
        threads may read at once."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Dataset of a sample and its index within that dataset."""
        counts = self._counts(sample)
        dataset = self._deal(sample, counts)
        self._cursor = (sample + 1, tuple(counts))
        return dataset, counts[dataset] - 1

    def first_sample(self, dataset: int, index: int) -> int:
        """The sample that is `index` of `dataset`: the inverse of `locate`."""
        sample = index * self._total // self._parts[dataset]  # it is not dealt before
        counts = self._counts(sample)
        while counts[dataset] <= index:
            self._deal(sample, counts)
            sample += 1
        return sample - 1

    def _counts(self, samples: int) -> list[int]:
        """How many of the first so many samples each dataset has."""
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
        """Add the sample that follows the first `sample` ones to the counts, and return its dataset."""
        parts, total = self._parts, self._total
        chosen = -1
        for dataset, (part, count) in enumerate(zip(parts, counts, strict=True)):
            early = count * total >= (sample + 1) * part
            if not early and (chosen < 0 or (count + 1) * parts[chosen] < (counts[chosen] + 1) * part):
                chosen = dataset
        counts[chosen] += 1
        return chosen
