"""One source of text that is read while a model is trained on it: its documents are shuffled as they pass by and
packed into samples, epoch after epoch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pangu.config.data import StreamData, TokenizerConfig
from pangu.config.errors import UserError
from pangu.data.documents import BadLine, documents, leave_out
from pangu.data.encoding import encode, held_out
from pangu.data.inputs import Place, read_chunks
from pangu.data.order import permuted
from pangu.data.passing_shuffle import PassingShuffle, Turn
from pangu.data.workers import parallel_map
from pangu.topology.random import random_key

log = logging.getLogger("pangu")

_AT_ONCE = 1 << 16
"""Bytes of text that are encoded at once: few, so that no sample waits for a whole chunk."""


@dataclass(frozen=True)
class Recipe:
    """What decides the samples of a source."""

    inputs: tuple[str, ...]
    data: StreamData
    held_out: bool
    """Which side of `data.holdout` is read."""
    tokenizer: TokenizerConfig
    vocab: int
    eod: int
    """Id after each document."""
    bos: int | None
    """Id before each document."""
    sequence: int
    """Tokens of a sample; samples overlap by the one that is a label in one of them and an input in the next."""
    least: int
    """Samples that an epoch must have."""
    shuffle: int
    """Span of the shuffle in tokens; 0: all comes in order."""
    keys: tuple[object, ...]
    """Of the order."""


class _Start(NamedTuple):
    """Before a chunk of text."""

    epoch: int
    place: Place
    bad: int
    """Bad lines of the epoch before it."""


@dataclass(frozen=True)
class _Texts:
    """Neighbouring documents of a chunk."""

    start: _Start
    """Of the chunk."""
    texts: list[str]


@dataclass(frozen=True)
class _Encoded:
    start: _Start
    digest: int
    """Of the first text."""
    documents: list[NDArray[np.int32]]


@dataclass
class _Chunk:
    """A chunk with documents that are not used up."""

    start: _Start
    num_documents: int
    """Documents of the epoch before it."""
    num_tokens: int
    digest: int
    """Of its first document."""
    waiting: int = 0


class PackedSource:
    """Endless samples of a source, one after another. Raises UserError for text that cannot be read, has changed since
    a position was noted, or is too short."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._ahead: Generator[_Encoded] | None = None

    def begin(self, position: dict[str, Any] | None) -> None:
        """Go to a position, or to the beginning. Raises KeyError, TypeError or ValueError for what is none."""
        self.close()
        start = _Start(0, Place(0, 0, 0), 0)
        self._num_documents = self._num_tokens = self._left = 0
        self._expected: int | None = None
        """Digest of the first document that is read."""
        self._skipped: Turn | None = None
        """The turn of the document that samples go on in; those before it were used up."""
        if position is not None:
            source, offset, line = map(int, position["place"])
            start = _Start(int(position["epoch"]), Place(source, offset, line), int(position["bad"]))
            self._num_documents, self._num_tokens = int(position["documents"]), int(position["tokens"])
            self._expected, self._left = int(position["digest"]), int(position["left"])
            epoch, passed, number = map(int, position["turn"])
            self._skipped = epoch, passed, number
        self._begun, self._epoch = position, start.epoch
        self._shuffle = PassingShuffle[tuple[_Chunk, NDArray[np.int32]]](
            self._recipe.shuffle, *self._recipe.keys, "documents"
        )
        self._chunks: deque[_Chunk] = deque()
        self._last: tuple[Turn, _Chunk] | None = None
        """The document whose tokens end the row."""
        self._row, self._at = np.empty(0, dtype=np.int32), 0
        """Tokens that samples are cut from, and how many of them were."""
        self._ahead = _read(self._recipe, start)

    def close(self) -> None:
        """End what reads ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    @property
    def epoch(self) -> int:
        """That of the last token that was used."""
        return 0 if self._last is None else self._last[0][0]

    @property
    def position(self) -> dict[str, Any] | None:
        """From where the samples go on, as JSON has it; None: from the beginning."""
        if self._last is None:
            return self._begun
        while not self._chunks[0].waiting:
            self._chunks.popleft()
        oldest = self._chunks[0]
        return {
            "epoch": oldest.start.epoch,
            "place": list(oldest.start.place),
            "bad": oldest.start.bad,
            "documents": oldest.num_documents,
            "tokens": oldest.num_tokens,
            "digest": oldest.digest,
            "turn": list(self._last[0]),
            "left": len(self._row) - self._at,
        }

    def take(self) -> NDArray[np.int32]:
        """The next sample: [sequence + 1] tokens."""
        sequence = self._recipe.sequence
        parts = [self._row[self._at :]]
        size = len(parts[0])
        while size <= sequence:
            parts.append(self._next_document())
            size += len(parts[-1])
        if len(parts) > 1:
            self._row, self._at = np.concatenate(parts), 0
        sample = self._row[self._at : self._at + sequence + 1]
        self._at += sequence
        return sample

    def _next_document(self) -> NDArray[np.int32]:
        while (taken := self._shuffle.take(self._epoch, self._num_tokens)) is None:
            self._read_on()
        turn, (chunk, ids) = taken
        if self._skipped is not None:
            if turn != self._skipped or len(ids) < self._left:
                raise self._changed()
            ids, self._skipped = ids[len(ids) - self._left :], None
        if self._last is not None:
            self._last[1].waiting -= 1
        self._last = turn, chunk
        return ids

    def _read_on(self) -> None:
        assert self._ahead is not None
        encoded = next(self._ahead)
        if encoded.start.epoch > self._epoch:
            self._end_epoch()
        if not encoded.documents:
            return
        if self._expected not in (None, encoded.digest):
            raise self._changed()
        self._expected = None
        if not self._chunks or self._chunks[-1].start != encoded.start:
            self._chunks.append(_Chunk(encoded.start, self._num_documents, self._num_tokens, encoded.digest))
        chunk = self._chunks[-1]
        for ids in encoded.documents:
            turn = self._shuffle.turn(self._epoch, self._num_tokens, self._num_documents)
            if self._skipped is None or turn >= self._skipped:
                self._shuffle.put(turn, (chunk, ids))
                chunk.waiting += 1
            self._num_documents += 1
            self._num_tokens += len(ids)

    def _end_epoch(self) -> None:
        recipe, tokens = self._recipe, self._num_tokens
        needed = recipe.least * recipe.sequence + 1
        if tokens < needed:
            raise UserError(
                f"{self._name}: an epoch has {tokens} tokens, but {needed} are needed at once ({recipe.least} x"
                f" model.sequence = {recipe.sequence}, and one more); use more text"
            )
        log.info("%s: epoch %d has %s tokens", self._name, self._epoch, f"{tokens:,}")
        self._epoch += 1
        self._num_documents = self._num_tokens = 0

    def _changed(self) -> UserError:
        return UserError(
            f"{self._name}: has changed since the checkpoint was written: another document stands where the run was;"
            " give it the same text, or another train.output to begin a new run"
        )

    @property
    def _name(self) -> str:
        names = self._recipe.inputs
        return " ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(recipe: Recipe, start: _Start) -> Generator[_Encoded]:
    """The documents from a place on, and nothing at the beginning of each later epoch."""
    encoding = partial(_encode, recipe.tokenizer, recipe.vocab, recipe.eod, recipe.bos)
    yield from parallel_map(encoding, _texts(recipe, start), recipe.data.workers)


def _encode(tokenizer: TokenizerConfig, vocab: int, eod: int, bos: int | None, group: _Texts) -> _Encoded:
    ids, lengths = encode(group.texts, tokenizer, vocab, eod, bos)
    begins = np.cumsum(lengths) - lengths
    parts = [ids[begin : begin + length].copy() for begin, length in zip(begins, lengths, strict=True)]
    return _Encoded(group.start, random_key(*group.texts[:1]), parts)


def _texts(recipe: Recipe, start: _Start) -> Iterator[_Texts]:
    key, most, whole = recipe.data.text_key, recipe.data.max_bad, recipe.data.whole_files
    while True:
        epoch, place, bad = start
        for chunk in read_chunks(_in_order(recipe, epoch), key, place, whole_files=whole):
            texts: list[str] = []
            size = 0
            for document in documents(chunk, key):
                if isinstance(document, BadLine):
                    bad += 1
                    leave_out(document, bad, most, f"data.max_bad = {most} such lines of an epoch", log.warning)
                elif held_out(document.text, recipe.data.holdout) == recipe.held_out:
                    texts.append(document.text)
                    size += document.size
                    if size >= _AT_ONCE:
                        yield _Texts(start, texts)
                        texts, size = [], 0
            if texts:
                yield _Texts(start, texts)
            start = _Start(epoch, chunk.after, bad)
        start = _Start(epoch + 1, Place(0, 0, 0), 0)
        yield _Texts(start, [])


def _in_order(recipe: Recipe, epoch: int) -> list[str]:
    """The inputs as they come in an epoch."""
    size = len(recipe.inputs)
    if not recipe.shuffle:
        return list(recipe.inputs)
    return [recipe.inputs[permuted(place, size, *recipe.keys, "inputs", epoch)] for place in range(size)]
