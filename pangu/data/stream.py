"""Endless streams of training samples: sample i is a function of (seed, i), so a resumed run needs only a number."""

from __future__ import annotations

from collections.abc import Sequence
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
    ) -> None:
        self._readers = [reader for reader, _ in readers_and_weights]
        self._sequence, self._vocab, self._seed, self._shuffle = sequence, vocab, seed, shuffle
        total = sum(weight for _, weight in readers_and_weights)
        for reader, weight in readers_and_weights:
            if not weight * RAREST >= total > 0:
                raise UserError(
                    f"{reader.prefix}: weight {weight} is less than 1/{RAREST} of the sum of the weights, {total};"
                    " raise it or leave the dataset out"
                )
            if len(reader.tokens) < sequence + 1:
                raise UserError(
                    f"{reader.prefix} has {len(reader.tokens)} tokens, but one sample of model.sequence = {sequence}"
                    f" takes {sequence + 1}; use more text or a model.sequence of at most {len(reader.tokens) - 1}"
                )
            self._check_ids(reader, reader.tokens[:_SCANNED])
        self._blend = Blend([weight for _, weight in readers_and_weights])

    @property
    def num_samples(self) -> int:
        ends = [self._blend.first_sample(i, self._num_windows(i)) for i in range(len(self._readers))]
        return min(ends)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        dataset, place = self._blend.locate(index)
        epoch, window = divmod(place, self._num_windows(dataset))
        start = self._start(dataset, epoch, window)
        reader = self._readers[dataset]
        tokens = reader.tokens[start : start + self._sequence + 1].astype(np.int64)
        self._check_ids(reader, tokens)
        return tokens

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
