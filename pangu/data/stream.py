"""Endless streams of training samples: sample i is a function of (seed, i), so a resumed run needs only a number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pangu.config.errors import UserError
from pangu.data.batch import Sample
from pangu.data.indexed import IndexedTokens
from pangu.data.order import Blend, permuted
from pangu.topology.random import generator, random_key

if TYPE_CHECKING:
    from pangu.data.packing import PackedDocuments

RAREST = 10_000
"""A dataset has at least one of this many samples: finding a position in a blend takes as many steps (see Blend)."""

_SCANNED = 1 << 24
"""Tokens of each dataset whose ids are checked when it is opened."""


class Stream(Protocol):
    """An endless stream of samples by number."""

    @property
    def num_samples(self) -> int | None:
        """Samples before any text comes again; None if none ever does, or if that is not known."""

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0."""

    def padding(self, index: int) -> int:
        """Tokens of padding in a sample."""
        return 0

    @property
    def position(self) -> dict[str, Any] | None:
        """What, beside the number of the next sample, makes going on from there cheap, as JSON has it; None: nothing
        is needed."""
        return None

    def resume(self, position: Mapping[str, Any] | None) -> None:
        """Go on from a position of an earlier process. Raises UserError if it belongs to other data."""
        return

    def close(self) -> None:
        """Let go of what reads ahead; the next sample takes it up."""
        return


class Dataset(Protocol):
    """A part of a stream, over and over: samples by epoch and place in it."""

    @property
    def num_samples(self) -> int:
        """Of an epoch."""

    def sample(self, epoch: int, place: int) -> Sample: ...

    def origin(self, epoch: int, place: int) -> str:
        """Where a sample comes from, in words."""

    def padding(self, epoch: int, place: int) -> int:
        """Tokens of padding in a sample."""


class Windows:
    """Documents in one long row, cut into windows of `sequence` tokens that overlap by the one token that is a label in
    one window and an input in the next. The remainder of an epoch is dropped. With `shuffle` each epoch has a different
    permutation of the windows and starts at a different offset; without it the windows come in order."""

    def __init__(self, reader: IndexedTokens, sequence: int, vocab: int, seed: int, shuffle: bool, number: int) -> None:
        """`number`: of the dataset in its stream."""
        if len(reader.tokens) < sequence + 1:
            raise UserError(
                f"{reader.prefix} has {len(reader.tokens)} tokens, but one sample of model.sequence = {sequence}"
                f" takes {sequence + 1}; use more text or a model.sequence of at most {len(reader.tokens) - 1}"
            )
        self._reader, self._sequence, self._vocab = reader, sequence, vocab
        self._seed, self._shuffle, self._number = seed, shuffle, number
        # a shuffled epoch leaves room for the largest offset, so that all are equally long
        self.num_samples = (
            max(1, len(reader.tokens) // sequence - 1) if shuffle else (len(reader.tokens) - 1) // sequence
        )

    def sample(self, epoch: int, place: int) -> Sample:
        start = self._start(epoch, place)
        tokens = self._reader.tokens[start : start + self._sequence + 1].astype(np.int64)
        check_ids(self._reader.prefix, tokens, self._vocab)
        return tokens

    def origin(self, epoch: int, place: int) -> str:
        return f"{self._reader.prefix} from token {self._start(epoch, place):,}"

    def padding(self, epoch: int, place: int) -> int:
        return 0

    def _start(self, epoch: int, place: int) -> int:
        if not self._shuffle:
            return place * self._sequence
        num_offsets = min(self._sequence, len(self._reader.tokens) - self.num_samples * self._sequence)
        offset = random_key(self._seed, "offset", self._number, epoch) % num_offsets
        window = permuted(place, self.num_samples, self._seed, "order", self._number, epoch)
        return offset + window * self._sequence


class Rows:
    """Packed documents; with `shuffle` each epoch has a different permutation of the samples."""

    def __init__(self, documents: PackedDocuments, seed: int, shuffle: bool, number: int) -> None:
        """`number`: of the dataset in its stream."""
        self._documents, self._seed, self._shuffle, self._number = documents, seed, shuffle, number
        self.num_samples = documents.num_samples

    def sample(self, epoch: int, place: int) -> Sample:
        return self._documents.row(self._row(epoch, place))

    def origin(self, epoch: int, place: int) -> str:
        row = self._row(epoch, place)
        pieces = self._documents.pieces(row)
        return f"{self._documents.reader.prefix}, row {row:,}, packed from {len(pieces)}"

    def padding(self, epoch: int, place: int) -> int:
        return self._documents.padding(self._row(epoch, place))

    def _row(self, epoch: int, place: int) -> int:
        if not self._shuffle:
            return place
        return permuted(place, self.num_samples, self._seed, "order", self._number, epoch)


@dataclass(frozen=True)
class _Stage:
    """Samples that are drawn by the same weights."""

    first: int
    datasets: list[int]
    """Those of a weight above 0."""
    blend: Blend
    before: list[int]
    """Samples of each dataset, drawn or not in this stage, that come before it."""


class SampleStream(Stream):
    """Samples of one or several datasets, drawn in proportion to their weights, each dataset's in its own order.

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
        later_weights: Sequence[tuple[int, Sequence[float]]] = (),
        packed: Sequence[PackedDocuments] = (),
    ) -> None:
        """`later_weights`: from which sample on which weights hold; each dataset goes on where it was. `packed`: the
        same datasets, where documents are packed."""
        readers = [reader for reader, _ in readers_and_weights]
        self._datasets: list[Dataset] = []
        for number, reader in enumerate(readers):
            keys = (seed, shuffle, number)
            one = Rows(packed[number], *keys) if packed else Windows(reader, sequence, vocab, *keys)
            check_ids(reader.prefix, reader.tokens[:_SCANNED], vocab)
            self._datasets.append(one)
        self._stages: list[_Stage] = []
        stages = ((0, [weight for _, weight in readers_and_weights]), *later_weights)
        for reader, row in zip(readers, zip(*(weights for _, weights in stages), strict=True), strict=True):
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
                left = self._datasets[dataset].num_samples - stage.before[dataset]
                if following is None or following.before[dataset] > self._datasets[dataset].num_samples:
                    ends.append(stage.first + stage.blend.first_sample(place, max(left, 0)))
        return min(ends)

    def __getitem__(self, index: int) -> Sample:
        dataset, epoch, place = self._locate(index)
        return dataset.sample(epoch, place)

    def origin(self, index: int) -> str:
        """Where a sample comes from, in words."""
        dataset, epoch, place = self._locate(index)
        return dataset.origin(epoch, place)

    def padding(self, index: int) -> int:
        """Tokens of padding in a sample."""
        dataset, epoch, place = self._locate(index)
        return dataset.padding(epoch, place)

    def _locate(self, index: int) -> tuple[Dataset, int, int]:
        """Dataset, epoch and place in it."""
        stage = self._stages[bisect_right(self._stages, index, key=attrgetter("first")) - 1]
        chosen, place = stage.blend.locate(index - stage.first)
        dataset = stage.datasets[chosen]
        return self._datasets[dataset], *divmod(stage.before[dataset] + place, self._datasets[dataset].num_samples)

    def _add_stage(self, first: int, weights: Sequence[float]) -> None:
        before = [0] * len(weights)
        if self._stages:
            last = self._stages[-1]
            before = list(last.before)
            for dataset, count in zip(last.datasets, last.blend.counts(first - last.first), strict=True):
                before[dataset] += count
        datasets = [dataset for dataset, weight in enumerate(weights) if weight]
        self._stages.append(_Stage(first, datasets, Blend([weights[dataset] for dataset in datasets]), before))


class SyntheticStream(Stream):
    """Tokens of a counter-based generator, without the ids in `avoid`: for measuring speed."""

    num_samples = None

    def __init__(self, sequence: int, vocab: int, seed: int, avoid: set[int]) -> None:
        self._sequence, self._seed = sequence, seed
        self._ids = np.setdiff1d(np.arange(vocab), list(avoid))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        draws = generator(self._seed, "synthetic", index)
        return self._ids[draws.integers(len(self._ids), size=self._sequence + 1)]


def check_ids(prefix: str, tokens: NDArray[np.integer], vocab: int) -> None:
    """Raise UserError for an id outside the vocabulary."""
    if not 0 <= tokens.min() <= tokens.max() < vocab:
        raise UserError(
            f"{prefix} holds the id {tokens.max() if tokens.min() >= 0 else tokens.min()}, but model.vocab ="
            f" {vocab}; was it written with another tokenizer?"
        )
