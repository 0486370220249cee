"""Endless streams of training samples: sample i is a function of (seed, i), so a resumed run needs only a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError
from pangu.data.batch import Sample
from pangu.data.indexed import IndexedTokens
from pangu.data.order import Blend, permuted
from pangu.topology.random import generator, random_key

if TYPE_CHECKING:
    from pangu.data.packing import PackedDocuments

RAREST = 10_000
"""Inverse of the smallest weight share of a dataset; locating a sample in a blend takes as many steps (see `Blend`)."""

_SCANNED = 1 << 24  # tokens of each dataset whose ids are checked on opening


class Stream(Protocol):
    """Endless stream of samples, accessed by number."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples before any text repeats; None if it never does or if that is unknown."""

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index` >= 0."""

    def padding(self, index: int) -> int:
        """Return the number of padding tokens in a sample."""
        return 0

    @property
    def position(self) -> dict[str, Any] | None:
        """JSON-compatible state that, with the next sample's number, makes resuming cheap; None if none is needed."""
        return None

    def resume(self, position: Mapping[str, Any] | None) -> None:
        """Resume from a position of an earlier process. Raises UserError if it belongs to other data."""
        return

    def close(self) -> None:
        """Stop prefetching; the next access to a sample restarts it."""
        return


class Dataset(ABC):
    """Repeatable part of a stream, whose samples are accessed by epoch and place in the epoch.

    With `shuffle` each epoch has a different permutation of the samples; without it they stay in order.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool, number: int) -> None:
        """Prepare dataset `number` of a stream, which has `num_samples` per epoch."""
        self.num_samples, self._seed, self._shuffle, self._number = num_samples, seed, shuffle, number

    @abstractmethod
    def sample(self, epoch: int, place: int) -> Sample:
        """Return a sample."""

    @abstractmethod
    def origin(self, epoch: int, place: int) -> str:
        """Return a description of where a sample comes from."""

    def padding(self, epoch: int, place: int) -> int:
        """Return the number of padding tokens in a sample."""
        return 0

    def _ordered(self, epoch: int, place: int) -> int:
        """Return the number of the sample at a place in an epoch."""
        return permuted(place, self.num_samples, self._seed, "order", self._number, epoch) if self._shuffle else place


class Windows(Dataset):
    """Windows of `sequence` + 1 tokens over the concatenated documents; consecutive windows overlap by one token.

    That token is a label in one window and an input in the next. The remainder of an epoch is dropped. With `shuffle`
    each epoch has a different offset too.
    """

    def __init__(self, reader: IndexedTokens, sequence: int, vocab: int, seed: int, shuffle: bool, number: int) -> None:
        """Prepare dataset `number` of a stream. Raises UserError if it is shorter than one sample."""
        size = len(reader.tokens)
        if size < sequence + 1:
            raise UserError(
                f"{reader.prefix} has {size} tokens, but one sample of model.sequence = {sequence}"
                f" takes {sequence + 1}; use more text or a model.sequence of at most {size - 1}"
            )
        # a shuffled epoch leaves room for the largest offset, so that all are equally long
        num_samples = max(1, size // sequence - 1) if shuffle else (size - 1) // sequence
        super().__init__(num_samples, seed, shuffle, number)
        self._reader, self._sequence, self._vocab = reader, sequence, vocab

    def sample(self, epoch: int, place: int) -> Sample:
        """Return a window."""
        start = self._start(epoch, place)
        tokens = self._reader.tokens[start : start + self._sequence + 1].astype(np.int64)
        check_ids(self._reader.prefix, tokens, self._vocab)
        return tokens

    def origin(self, epoch: int, place: int) -> str:
        """Return the prefix and first token of a window."""
        return f"{self._reader.prefix} from token {self._start(epoch, place):,}"

    def _start(self, epoch: int, place: int) -> int:
        offset = 0
        if self._shuffle:
            num_offsets = min(self._sequence, len(self._reader.tokens) - self.num_samples * self._sequence)
            offset = random_key(self._seed, "offset", self._number, epoch) % num_offsets
        return offset + self._ordered(epoch, place) * self._sequence


class Rows(Dataset):
    """Rows of packed documents."""

    def __init__(self, documents: PackedDocuments, seed: int, shuffle: bool, number: int) -> None:
        """Prepare dataset `number` of a stream."""
        super().__init__(documents.num_samples, seed, shuffle, number)
        self._documents = documents

    def sample(self, epoch: int, place: int) -> Sample:
        """Return a packed row."""
        return self._documents.row(self._ordered(epoch, place))

    def origin(self, epoch: int, place: int) -> str:
        """Return the prefix, number and piece count of a row."""
        row = self._ordered(epoch, place)
        pieces = self._documents.pieces(row)
        return f"{self._documents.reader.prefix}, row {row:,}, packed from {len(pieces)}"

    def padding(self, epoch: int, place: int) -> int:
        """Return the number of padding tokens in a row."""
        return self._documents.padding(self._ordered(epoch, place))


@dataclass(frozen=True)
class _WeightStage:
    first: int
    datasets: list[int]  # those with a positive weight
    blend: Blend
    before: list[int]  # samples of each dataset (also of those without weight) that precede this stage


class SampleStream(Stream):
    """Stream of samples of one or several datasets in proportion to their weights, each dataset in its own order.

    Raises UserError, naming the prefix, for a dataset that is too short, has too small a weight, or has an id outside
    the vocabulary (checked on opening for the first 16 million tokens, for the others when their sample is read).
    """

    def __init__(
        self,
        readers_and_weights: Sequence[tuple[IndexedTokens, float]],
        sequence: int,
        vocab: int,
        seed: int,
        shuffle: bool = True,
        weight_schedule: Sequence[tuple[int, Sequence[float]]] = (),
        packed: Sequence[PackedDocuments] = (),
    ) -> None:
        """Open the stream; `weight_schedule`: (first sample, weights) of stages, `packed`: datasets, packed."""
        readers = [reader for reader, _ in readers_and_weights]
        self._datasets: list[Dataset] = []
        for number, reader in enumerate(readers):
            keys = (seed, shuffle, number)
            one = Rows(packed[number], *keys) if packed else Windows(reader, sequence, vocab, *keys)
            check_ids(reader.prefix, reader.tokens[:_SCANNED], vocab)
            self._datasets.append(one)
        self._stages: list[_WeightStage] = []
        stages = ((0, [weight for _, weight in readers_and_weights]), *weight_schedule)
        for reader, row in zip(readers, zip(*(weights for _, weights in stages), strict=True), strict=True):
            for weight, (_, weights) in zip(row, stages, strict=True):
                if not weight * RAREST >= sum(weights) > 0 and (weight or not any(row)):
                    raise too_rare(reader.prefix, weight, sum(weights), "dataset")
        for first, weights in stages:
            self._add_stage(first, weights)

    @property
    def num_samples(self) -> int:
        """Number of samples before any dataset repeats."""
        ends = []
        for stage, following in zip(self._stages, [*self._stages[1:], None], strict=True):
            for place, dataset in enumerate(stage.datasets):
                left = self._datasets[dataset].num_samples - stage.before[dataset]
                if following is None or following.before[dataset] > self._datasets[dataset].num_samples:
                    ends.append(stage.first + stage.blend.first_sample(place, max(left, 0)))
        return min(ends)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`."""
        dataset, epoch, place = self._locate(index)
        return dataset.sample(epoch, place)

    def origin(self, index: int) -> str:
        """Return a description of where a sample comes from."""
        dataset, epoch, place = self._locate(index)
        return dataset.origin(epoch, place)

    def padding(self, index: int) -> int:
        """Return the number of padding tokens in a sample."""
        dataset, epoch, place = self._locate(index)
        return dataset.padding(epoch, place)

    def _locate(self, index: int) -> tuple[Dataset, int, int]:
        stage = self._stages[bisect_right(self._stages, index, key=attrgetter("first")) - 1]
        chosen, place = stage.blend.locate(index - stage.first)
        dataset = stage.datasets[chosen]
        return self._datasets[dataset], *divmod(stage.before[dataset] + place, self._datasets[dataset].num_samples)

    def _add_stage(self, first: int, weights: Sequence[float]) -> None:
        before = [0] * len(weights)
        if self._stages:  # each dataset continues where it was
            last = self._stages[-1]
            before = list(last.before)
            for dataset, count in zip(last.datasets, last.blend.counts(first - last.first), strict=True):
                before[dataset] += count
        datasets = [dataset for dataset, weight in enumerate(weights) if weight]
        self._stages.append(_WeightStage(first, datasets, Blend([weights[dataset] for dataset in datasets]), before))


class SyntheticStream(Stream):
    """Stream of tokens from a counter-based generator, without the ids in `avoid`, for measuring speed."""

    num_samples = None

    def __init__(self, sequence: int, vocab: int, seed: int, avoid: set[int]) -> None:
        """Prepare the ids to draw from."""
        self._sequence, self._seed = sequence, seed
        self._ids = np.setdiff1d(np.arange(vocab), list(avoid))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index`, [sequence + 1]."""
        draws = generator(self._seed, "synthetic", index)
        return self._ids[draws.integers(len(self._ids), size=self._sequence + 1)]


def too_rare(name: str, weight: float, total: float, kind: str) -> UserError:
    """Return the error about a dataset or entry whose weight is too small a part of the `total`."""
    rule = f"weight {weight} is less than 1/{RAREST} of the sum of the weights, {total}"
    return UserError(f"{name}: {rule}; raise it, or remove the {kind}")


def check_ids(prefix: str, tokens: NDArray[np.integer], vocab: int) -> None:
    """Raise UserError for an id outside the vocabulary."""
    if not 0 <= tokens.min() <= tokens.max() < vocab:
        raise UserError(
            f"{prefix} contains the id {tokens.max() if tokens.min() >= 0 else tokens.min()}, but model.vocab ="
            f" {vocab}; use the tokenizer of the model, or a larger model.vocab"
        )
