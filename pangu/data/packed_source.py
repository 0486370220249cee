"""Text source read during training: its documents are shuffled in a stream and packed into samples, epoch by epoch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError
from pangu.config.data import StreamData
from pangu.data.documents import BadLine, documents, held_out, leave_out
from pangu.data.inputs import TextPosition, read_chunks
from pangu.data.order import ShuffleBuffer, Turn, permuted
from pangu.data.workers import parallel_map
from pangu.topology.random import random_key

log = logging.getLogger("pangu")

_AT_ONCE = 1 << 16  # bytes of text encoded at once: few, so that no sample waits for a full chunk


@dataclass(frozen=True)
class StreamRecipe:
    """Settings that determine the samples of a source."""

    inputs: tuple[str, ...]
    data: StreamData
    held_out: bool
    """True to read the held-out side of `data.holdout`, False to read the training side."""
    encode: Callable[[Sequence[str]], tuple[NDArray[np.int32], NDArray[np.int32]]]
    """Picklable function that returns all ids of texts, each with its end, and ids per text."""
    sequence: int
    """Tokens per sample; consecutive samples overlap by one token: last label of one, first input of the next."""
    least: int
    """Minimum number of samples per epoch."""
    shuffle: int
    """Shuffle span in tokens; 0 keeps everything in order."""
    keys: tuple[object, ...]
    """Random keys of the order."""


class _Start(NamedTuple):
    """Reading position before a chunk of text."""

    epoch: int
    place: TextPosition
    bad: int  # bad lines of the epoch before the chunk


@dataclass(frozen=True)
class _Texts:
    start: _Start  # of the chunk
    texts: list[str]


@dataclass(frozen=True)
class _Encoded:
    start: _Start
    digest: int  # of the first text
    documents: list[NDArray[np.int32]]


@dataclass
class _Chunk:
    start: _Start
    num_documents: int  # of the epoch before the chunk
    num_tokens: int
    digest: int  # of its first document
    waiting: int = 0  # its documents that are not used up


class PackedSource:
    """Endless samples of a source. Raises UserError for text that is unreadable, too short or changed since a save."""

    def __init__(self, recipe: StreamRecipe) -> None:
        """Prepare the source; `begin` starts reading."""
        self._recipe = recipe
        self._ahead: Generator[_Encoded] | None = None

    def begin(self, position: dict[str, Any] | None) -> None:
        """Start reading at a position (None: the beginning). Raises KeyError, TypeError or ValueError if invalid."""
        self.close()
        start = _Start(0, TextPosition(0, 0, 0), 0)
        self._num_documents = self._num_tokens = self._left = 0
        self._expected: int | None = None  # digest of the first document to be read
        self._skipped: Turn | None = None  # turn of the document to resume in; those before it were used up
        if position is not None:
            source, offset, line = map(int, position["place"])
            start = _Start(int(position["epoch"]), TextPosition(source, offset, line), int(position["bad"]))
            self._num_documents, self._num_tokens = int(position["documents"]), int(position["tokens"])
            self._expected, self._left = int(position["digest"]), int(position["left"])
            epoch, passed, number = map(int, position["turn"])
            self._skipped = epoch, passed, number
        self._begun, self._epoch = position, start.epoch
        self._shuffle = ShuffleBuffer[tuple[_Chunk, NDArray[np.int32]]](
            self._recipe.shuffle, *self._recipe.keys, "documents"
        )
        self._chunks: deque[_Chunk] = deque()
        self._last: tuple[Turn, _Chunk] | None = None  # document whose tokens end the row
        self._row, self._at = np.empty(0, dtype=np.int32), 0  # tokens to cut samples from, and how many are used
        texts = _texts(self._recipe, start)
        self._ahead = parallel_map(partial(_encode, self._recipe.encode), texts, self._recipe.data.workers)

    def close(self) -> None:
        """Stop prefetching."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    @property
    def epoch(self) -> int:
        """Epoch of the last token that was used."""
        return 0 if self._last is None else self._last[0][0]

    @property
    def position(self) -> dict[str, Any] | None:
        """JSON-compatible position to resume from; None is the beginning."""
        return self.position_before(len(self._row) - self._at)

    @property
    def turn(self) -> Turn:
        """Turn of the last document that was taken."""
        assert self._last is not None
        return self._last[0]

    def position_before(self, left: int) -> dict[str, Any] | None:
        """Return the position where the last `left` tokens of the last document have not been used."""
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
            "left": left,
        }

    def take(self) -> NDArray[np.int32]:
        """Return the tokens of the next sample, [sequence + 1]."""
        sequence = self._recipe.sequence
        parts = [self._row[self._at :]]
        size = len(parts[0])
        while size <= sequence:
            parts.append(self.next_document())
            size += len(parts[-1])
        if len(parts) > 1:
            self._row, self._at = np.concatenate(parts), 0
        sample = self._row[self._at : self._at + sequence + 1]
        self._at += sequence
        return sample

    def next_document(self) -> NDArray[np.int32]:
        """Return the ids of the next document, or what is left of the one in which reading began."""
        while (taken := self._shuffle.pop(self._epoch, self._num_tokens)) is None:
            self._read_on()
        turn, (chunk, ids) = taken
        if self._skipped is not None:
            if turn != self._skipped or len(ids) < self._left:
                raise self.changed()
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
            raise self.changed()
        self._expected = None
        if not self._chunks or self._chunks[-1].start != encoded.start:
            self._chunks.append(_Chunk(encoded.start, self._num_documents, self._num_tokens, encoded.digest))
        chunk = self._chunks[-1]
        for ids in encoded.documents:
            turn = self._shuffle.turn(self._epoch, self._num_tokens, self._num_documents)
            if self._skipped is None or turn >= self._skipped:
                self._shuffle.push(turn, (chunk, ids))
                chunk.waiting += 1
            self._num_documents += 1
            self._num_tokens += len(ids)

    def _end_epoch(self) -> None:
        recipe, tokens = self._recipe, self._num_tokens
        needed = recipe.least * recipe.sequence + 1
        if tokens < needed:
            raise UserError(
                f"{self._name}: an epoch has {tokens} tokens, but a batch needs {needed} ({recipe.least} x"
                f" model.sequence = {recipe.sequence}, plus one); use more text, or lower batch.global_size"
            )
        log.info("%s: epoch %d has %s tokens", self._name, self._epoch, f"{tokens:,}")
        self._epoch += 1
        self._num_documents = self._num_tokens = 0

    def changed(self) -> UserError:
        """Return the error of text that differs from what a position was taken of."""
        return UserError(
            f"{self._name}: has changed since the checkpoint was written: a different document is at its position;"
            " restore the text, or set another train.output to start a new run"
        )

    @property
    def _name(self) -> str:
        names = self._recipe.inputs
        return " ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _encode(encode: Callable[[Sequence[str]], tuple[NDArray[np.int32], NDArray[np.int32]]], group: _Texts) -> _Encoded:
    ids, lengths = encode(group.texts)
    parts = np.split(ids, np.cumsum(lengths)[:-1]) if group.texts else []
    return _Encoded(group.start, random_key(*group.texts[:1]), [part.copy() for part in parts])


def _texts(recipe: StreamRecipe, start: _Start) -> Iterator[_Texts]:
    """Yield groups of documents from `start` on, and an empty group at the beginning of each later epoch."""
    key, most, whole_files = recipe.data.text_key, recipe.data.max_bad, recipe.data.whole_files
    while True:
        epoch, place, bad = start
        for chunk in read_chunks(_in_order(recipe, epoch), key, place, whole_files=whole_files):
            texts: list[str] = []
            size = 0
            for document in documents(chunk, key):
                if isinstance(document, BadLine):
                    bad += 1
                    leave_out(document, bad, most, f"data.max_bad = {most} bad lines per epoch", log.warning)
                elif held_out(document.text, recipe.data.holdout) == recipe.held_out:
                    texts.append(document.text)
                    size += document.size
                    if size >= _AT_ONCE:
                        yield _Texts(start, texts)
                        texts, size = [], 0
            if texts:
                yield _Texts(start, texts)
            start = _Start(epoch, chunk.after, bad)
        start = _Start(epoch + 1, TextPosition(0, 0, 0), 0)
        yield _Texts(start, [])


def _in_order(recipe: StreamRecipe, epoch: int) -> list[str]:
    size = len(recipe.inputs)
    if not recipe.shuffle:
        return list(recipe.inputs)
    return [recipe.inputs[permuted(place, size, *recipe.keys, "inputs", epoch)] for place in range(size)]
