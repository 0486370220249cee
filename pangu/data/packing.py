"""Packing of documents into samples without needless truncation.

Cutting the corpus every `sequence` tokens splits documents, so that tokens after a cut are predicted without their
context (Ding et al. 2024, "Fewer truncations improve language modeling"). Here only a document longer than a sample is
cut, into full samples and a remainder; remainders and uncut documents are combined so that samples are nearly full, and
the rest of a sample is padding. The assignment is computed once and written to an index next to the token files, which
is memory-mapped: a run of any size starts immediately and reads any sample in constant time.

    documents of 5, 3, 2, 4, 1 and 9 tokens in samples of 6:   6 of 9 | 5 1 | 4 2 | 3 and 3 of 9
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError, reading, writing
from pangu.common.files import NewFile
from pangu.config.data import PackingConfig
from pangu.data.batch import Row
from pangu.data.indexed import IndexedTokens, bin_path, idx_path, open_indexed
from pangu.data.stream import check_ids
from pangu.topology.random import generator

Method = Literal["best_fit", "single"]

_VERSION = 1  # changes when the same documents are packed differently
_HEADER = struct.Struct("<8s8Q")
_MAGIC = b"PGPACK\0\0"
# Tokens of a document that a sample predicts. The first input is the id that begins or ends a document. With a negative
# length it is the token before `start`, because the document continues there or begins with `Packing.bos`.
_PIECE = np.dtype([("start", "<i8"), ("length", "<i4")])
_AT_ONCE = 1 << 18  # documents packed together: enough to keep padding at or below 0.1%


@dataclass(frozen=True)
class Packing:
    """Packing settings of one dataset."""

    prefix: str
    sequence: int
    method: Method
    folder: str | None
    """Folder of the index; None puts it next to the token files."""
    first_is_input: bool = False
    """True if the first token of each document is an input only and is not predicted."""
    bos: int | None = None
    """Id before each text: not predicted in documents that begin with it, prepended to the others."""

    @property
    def path(self) -> Path:
        """Path of the index."""
        name = f"{Path(self.prefix).name}.{self.method}-{self.sequence}.packing"
        if self.folder is None:
            return Path(self.prefix).with_name(name)
        place = blake2b(str(Path(self.prefix).absolute()).encode(), digest_size=4).hexdigest()
        return Path(self.folder) / f"{place}-{name}"

    def header(self, num_pieces: int, num_samples: int) -> bytes:
        """Return the header of an index for the current token files. Raises OSError."""
        data, idx = bin_path(self.prefix).stat(), idx_path(self.prefix).stat()
        facts = (data.st_size, idx.st_size, idx.st_mtime_ns, idx.st_ino)
        kind = _VERSION * 2 + self.first_is_input + (0 if self.bos is None else self.bos + 1 << 32)
        return _HEADER.pack(_MAGIC, kind, self.sequence, *facts, num_pieces, num_samples)


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the bin of each piece, [pieces], by best-fit decreasing (Johnson 1974); lengths are 1 to `capacity`.

    Pieces are placed from the longest to the shortest, each in the bin with the least room that fits it, or in a new
    one. Pieces of one length are placed together, so the number of operations depends on the distinct lengths only.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    each, firsts = np.unique(-lengths[order], return_index=True)
    stops = [*firsts[1:], len(lengths)]
    rooms: list[int] = []  # free room of the bins that have any, distinct and in increasing order
    pools: dict[int, list[NDArray[np.int64]]] = {}
    num_bins = 0

    def leave(chosen: NDArray[np.int64], room: int) -> None:
        if room and len(chosen):
            if room not in pools:
                insort(rooms, room)
            pools.setdefault(room, []).append(chosen)

    for length, first, stop in zip((-each).tolist(), firsts.tolist(), map(int, stops), strict=True):
        while first < stop:
            place = bisect_left(rooms, length)
            room = rooms.pop(place) if place < len(rooms) else capacity
            # after taking a piece, the bin with the least room still has the least, as long as another piece fits
            in_each = room // length
            needed = -(-(stop - first) // in_each)
            if room in pools:
                there = np.concatenate(pools.pop(room))
                chosen, left = there[:needed], there[needed:]
                leave(left, room)
            else:
                chosen = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            pieces = order[first : min(stop, first + len(chosen) * in_each)]
            bins[pieces] = np.repeat(chosen, in_each)[: len(pieces)]
            full, more = divmod(len(pieces), in_each)
            leave(chosen[:full], room - in_each * length)
            leave(chosen[full:], room - more * length)
            first += len(pieces)
    return bins


class Piece(NamedTuple):
    """Document, or a part of one, in a sample."""

    first: int
    """First input, which predicts the first label."""
    labels: NDArray[Any]
    counted: NDArray[np.uint8] | None
    """1 for labels that count in the loss; None counts all."""


def packed_row(pieces: Iterable[Piece], size: int, pad: int) -> Row:
    """Return the sample of some pieces, [size], with padding after them."""
    tokens, labels = np.full((2, size), pad, dtype=np.int64)
    counted, begins = np.zeros((2, size), dtype=bool)
    place = 0
    for piece in pieces:
        stop = place + len(piece.labels)
        labels[place:stop] = piece.labels
        tokens[place] = piece.first
        tokens[place + 1 : stop] = labels[place : stop - 1]
        counted[place:stop] = True if piece.counted is None else piece.counted
        begins[place] = True
        place = stop
    begins[place : place + 1] = True
    return Row(tokens, labels, counted, begins, padding=np.arange(size) >= place)


def write_packing(packing: Packing, on_progress: Callable[[], None] = lambda: None) -> None:
    """Write the index of a dataset unless it is current; `on_progress` is called meanwhile. Raises UserError."""
    if _is_current(packing):
        return
    reader, path = open_indexed(packing.prefix), packing.path
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(NewFile(path)) as new:
                _write(new.file, reader, packing, on_progress)
                new.finish()
                new.publish()
    except UserError as error:
        if packing.folder is None and isinstance(error.__cause__, OSError):
            raise UserError(f"{error}; set data.packing.index=FOLDER to keep the index elsewhere") from error
        raise


def _write(file: BinaryIO, reader: IndexedTokens, packing: Packing, on_progress: Callable[[], None]) -> None:
    file.write(bytes(_HEADER.size))
    counts = []
    for pieces, in_each in _packed(reader, packing):
        on_progress()
        file.write(pieces.tobytes())
        counts.append(in_each)
    if not counts:
        raise UserError(f"{bin_path(packing.prefix)} has no token to predict; use more text")
    stops = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype("<i8")
    file.write(stops.tobytes())
    file.seek(0)
    file.write(packing.header(int(stops[-1]), len(stops) - 1))


def _packed(reader: IndexedTokens, packing: Packing) -> Iterator[tuple[NDArray[np.void], NDArray[np.int64]]]:
    """Yield the pieces in sample order and the number of pieces per sample, for one group of documents at a time."""
    for number, (starts, lengths) in enumerate(_pieces(reader, packing)):
        sizes = np.abs(lengths).astype(np.int64)
        if packing.method == "single":
            bins, order = np.arange(len(sizes)), np.arange(len(sizes))
        else:
            # randomize which documents of equal length share a sample, and their order in it
            source = generator("packing", packing.sequence, number)
            mixed = source.permutation(len(sizes))
            starts, lengths = starts[mixed], lengths[mixed]
            bins = best_fit_decreasing(sizes[mixed], packing.sequence)
            order = np.lexsort((source.permutation(len(sizes)), bins))
        pieces = np.empty(len(order), dtype=_PIECE)
        pieces["start"], pieces["length"] = starts[order], lengths[order]
        yield pieces, np.bincount(bins)


def _pieces(reader: IndexedTokens, packing: Packing) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield starts and lengths (see `_PIECE`) of pieces in document order, for one group of documents at a time."""
    size, begin = packing.sequence, 0
    for first in range(0, len(reader.document_index) - 1, _AT_ONCE):
        sequences = np.asarray(reader.document_index[first : first + _AT_ONCE + 1])
        with reading(idx_path(reader.prefix), IndexError, ValueError, rule="its document index is damaged"):
            lengths = reader.sequence_lengths[sequences[0] : sequences[-1]]
            stops = begin + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[sequences - sequences[0]]
            if (np.diff(stops) < 0).any() or stops[-1] > len(reader.tokens):
                raise ValueError("documents overlap, or exceed the tokens")
        begin = int(stops[-1])
        has_input = np.full(len(stops) - 1, packing.first_is_input)
        if packing.bos is not None and len(reader.tokens):
            has_input |= reader.tokens[np.minimum(stops[:-1], len(reader.tokens) - 1)] == packing.bos
        starts = stops[:-1] + has_input
        predicted = np.maximum(stops[1:] - starts, 0)
        in_each = -(-predicted // size)
        document = np.repeat(np.arange(len(predicted)), in_each)
        number = np.arange(len(document)) - np.repeat(np.cumsum(in_each) - in_each, in_each)
        pieces = np.minimum(predicted[document] - number * size, size)
        is_continued = (number > 0) | has_input[document]
        if len(pieces):
            yield starts[document] + number * size, np.where(is_continued, -pieces, pieces)


def _is_current(packing: Packing) -> bool:
    try:
        with packing.path.open("rb") as file:
            header = file.read(_HEADER.size)
        _check_size(packing, header)
    except (OSError, UserError):
        return False
    return True


def _check_size(packing: Packing, header: bytes) -> tuple[int, int]:
    """Return (pieces, samples) of an index. Raises UserError if it is not the index of these files, OSError."""
    path, remedy = packing.path, "remove it, and the next run writes it again"
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UserError(f"{path}: is not an index of packed documents; {remedy}")
    *_, num_pieces, num_samples = _HEADER.unpack(header)
    if header != packing.header(num_pieces, num_samples):
        raise UserError(f"{path}: does not match the current {packing.prefix}.bin and .idx; {remedy}")
    size = path.stat().st_size
    if size != _HEADER.size + _PIECE.itemsize * num_pieces + 8 * (num_samples + 1) or not num_samples:
        raise UserError(f"{path}: has {size} bytes, which does not match {num_pieces:,} pieces; {remedy}")
    return num_pieces, num_samples


class PackedDocuments:
    """Samples of one packed dataset, in index order."""

    def __init__(
        self, packing: Packing, vocab: int, ids: PackingConfig, counted: NDArray[np.uint8] | None = None
    ) -> None:
        """Memory-map an index; `counted` is 1 for tokens that count in the loss, None counts all. Raises UserError."""
        self.reader = open_indexed(packing.prefix)
        self._packing, self._vocab, self._counted = packing, vocab, counted
        known = [token for token in (packing.bos, ids.eod, 0) if token is not None]
        self._begin = known[0]  # first input of a document, which predicts its first token
        self._pad = next(token for token in (ids.pad, ids.eod, *known) if token is not None)
        path = packing.path
        with reading(path):
            with path.open("rb") as file:
                num_pieces, self.num_samples = _check_size(packing, file.read(_HEADER.size))
            self._pieces = np.memmap(path, _PIECE, "r", _HEADER.size, (num_pieces,))
            stops = _HEADER.size + _PIECE.itemsize * num_pieces
            self._stops = np.memmap(path, "<i8", "r", stops, (self.num_samples + 1,))

    def row(self, number: int) -> Row:
        """Return sample `number`. Raises UserError if the index is damaged or a token is outside the vocabulary."""
        pieces = [
            Piece(
                self.reader.tokens[start - 1] if is_continued else self._begin,
                self.reader.tokens[start : start + length],
                None if self._counted is None else self._counted[start : start + length],
            )
            for start, length, is_continued in self.pieces(number)
        ]
        row = packed_row(pieces, self._packing.sequence, self._pad)
        check_ids(self.reader.prefix, row.tokens, self._vocab)
        check_ids(self.reader.prefix, row.labels, self._vocab)
        return row

    def padding(self, number: int) -> int:
        """Return the number of padding tokens in a sample."""
        return self._packing.sequence - sum(length for _, length, _ in self.pieces(number))

    def pieces(self, number: int) -> list[tuple[int, int, bool]]:
        """Return (first token, length, continues a document) of each piece of a sample. Raises UserError."""
        size, num_tokens = self._packing.sequence, len(self.reader.tokens)
        begin, stop = map(int, self._stops[number : number + 2])
        if 0 <= begin < stop <= min(len(self._pieces), begin + size):
            pieces = [(start, abs(length), length < 0) for start, length in self._pieces[begin:stop].tolist()]
            inside = all(int(is_continued) <= start <= num_tokens - length for start, length, is_continued in pieces)
            if inside and all(length for _, length, _ in pieces) and sum(length for _, length, _ in pieces) <= size:
                return pieces
        raise UserError(f"{self._packing.path}: damaged; remove it, and the next run writes it again")


def packings(prefixes: Sequence[str], config: PackingConfig, sequence: int) -> list[Packing]:
    """Return the packing of each prefix; none if samples are cut from the concatenated tokens."""
    if config.method == "concat":
        return []
    assert config.bos != "auto"
    return [Packing(prefix, sequence, config.method, config.index, bos=config.bos) for prefix in prefixes]
