"""Endless streams of training samples: sample i is a function of (seed, i), so a resumed run needs only a number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pangu.config.errors import UserError
from pangu.data.indexed import IndexedTokens
from pangu.data.order import Blend, permuted
from pangu.topology.random import generator, random_key

RAREST = 10_000
"""A dataset has at least one of this many samples: finding a position in a blend takes as many steps (see Blend)."""

_SCANNED = 1 << 24
"""Tokens of each dataset whose ids are checked when it is opened."""


class Stream(Protocol):
    """An endless stream of samples by number."""

    @property
    def num_samples(self) -> int | None:
        """Samples before any window repeats; None if none ever does."""

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index` >= 0: [sequence + 1] tokens, the last of which is only a label."""


@dataclass(frozen=True)
class _Stage:
    """Samples that are drawn by the same weights."""

    first: int
    datasets: list[int]
    """Those of a weight above 0."""
    blend: Blend
    before: list[int]
    """Samples of each dataset, drawn or not in this stage, that come before it."""


class SampleStream:
    """Windows over the tokens of one or several datasets, drawn in proportion to their weights.

    A dataset's documents form one long row, cut into windows of `sequence` tokens that overlap by the one token that is
    a label in one window and an input in the next. The remainder of an epoch is dropped. With `shuffle` each epoch has
    a different permutation of the windows and starts at a different offset; without it the windows come in order.

    Raises UserError, naming the prefix, for a dataset that is too short, has too small a weight, or holds an id outside
    the vocabulary (of the first 16 million tokens at once, of the others when their sample is read).
    """

    def __init__(
        self,
        readers_and_weights: Sequence[tuple[IndexedTokens, float]],
        sequence: int,
        vocab: int,
        seed: int,
        shuffle: bool = True,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """`later`: from which sample on which weights hold; each dataset goes on where it was."""
        self._readers = [reader for reader, _ in readers_and_weights]
        self._sequence, self._vocab, self._seed, self._shuffle = sequence, vocab, seed, shuffle
        for reader in self._readers:
            if len(reader.tokens) < sequence + 1:
                raise UserError(
                    f"{reader.prefix} has {len(reader.tokens)} tokens, but one sample of model.sequence = {sequence}"
                    f" takes {sequence + 1}; use more text or a model.sequence of at most {len(reader.tokens) - 1}"
                )
            self._check_ids(reader, reader.tokens[:_SCANNED])
        self._stages: list[_Stage] = []
        stages = ((0, [weight for _, weight in readers_and_weights]), *later)
        for reader, row in zip(self._readers, zip(*(weights for _, weights in stages), strict=True), strict=True):
            for weight, (_, weights) in zip(row, stages, strict=True):
                if not weight * RAREST >= sum(weights) > 0 and (weight or not any(row)):
                    raise UserError(
                        f"{reader.prefix}: weight {weight} is less than 1/{RAREST} of the sum of the weights,"
                        f" {sum(weights)}; raise it or leave the dataset out"
                    )
        for first, weights in stages:
            self._add_stage(first, weights)

    @property
    def num_samples(self) -> int:
        ends = []
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            for place, dataset in enumerate(stage.datasets):
                left = self._num_windows(dataset) - stage.before[dataset]
                if following is None or following.before[dataset] > self._num_windows(dataset):
                    ends.append(stage.first + stage.blend.first_sample(place, max(left, 0)))
        return min(ends)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        reader, start = self._locate(index)
        tokens = reader.tokens[start : start + self._sequence + 1].astype(np.int64)
        self._check_ids(reader, tokens)
        return tokens

    def origin(self, index: int) -> tuple[str, int]:
        """Prefix of the dataset that a sample comes from, and its first token there."""
        reader, start = self._locate(index)
        return reader.prefix, start

    def _locate(self, index: int) -> tuple[IndexedTokens, int]:
        stage = self._stages[bisect_right(self._stages, index, key=attrgetter("first")) - 1]
        chosen, place = stage.blend.locate(index - stage.first)
        dataset = stage.datasets[chosen]
        epoch, window = divmod(stage.before[dataset] + place, self._num_windows(dataset))
        return self._readers[dataset], self._start(dataset, epoch, window)

    def _add_stage(self, first: int, weights: Sequence[float]) -> None:
        before = [0] * len(weights)
        if self._stages:
            last = self._stages[-1]
            before = list(last.before)
            for dataset, count in zip(last.datasets, last.blend.counts(first - last.first), strict=True):
                before[dataset] += count
        datasets = [dataset for dataset, weight in enumerate(weights) if weight]
        self._stages.append(_Stage(first, datasets, Blend([weights[dataset] for dataset in datasets]), before))

    def _num_windows(self, dataset: int) -> int:
        """Windows of an epoch. A shuffled epoch leaves room for the largest offset, so that all are equally long."""
        num_tokens = len(self._readers[dataset].tokens)
        if self._shuffle:
            return max(1, num_tokens // self._sequence - 1)
        return (num_tokens - 1) // self._sequence

    def _start(self, dataset: int, epoch: int, window: int) -> int:
        if not self._shuffle:
            return window * self._sequence
        num_windows = self._num_windows(dataset)
        num_offsets = min(self._sequence, len(self._readers[dataset].tokens) - num_windows * self._sequence)
        offset = random_key(self._seed, "offset", dataset, epoch) % num_offsets
        return offset + permuted(window, num_windows, self._seed, "order", dataset, epoch) * self._sequence

    def _check_ids(self, reader: IndexedTokens, tokens: NDArray[np.integer]) -> None:
        if not 0 <= tokens.min() <= tokens.max() < self._vocab:
            raise UserError(
                f"{reader.prefix} holds the id {tokens.max() if tokens.min() >= 0 else tokens.min()}, but model.vocab ="
                f" {self._vocab}; was it written with another tokenizer?"
            )


class SyntheticStream:
    """Tokens of a counter-based generator, without the ids in `avoid`: for measuring speed."""

    num_samples = None

    def __init__(self, sequence: int, vocab: int, seed: int, avoid: set[int]) -> None:
        self._sequence, self._seed = sequence, seed
        self._ids = np.setdiff1d(np.arange(vocab), list(avoid))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        draws = generator(self._seed, "synthetic", index)
        return self._ids[draws.integers(len(self._ids), size=self._sequence + 1)]
