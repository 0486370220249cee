"""Indexed token files: `PREFIX.bin` (tokens back to back) and `PREFIX.idx` (where they begin), as Megatron has them.

Layout of `.idx`, little-endian: magic (9 bytes), version (u64), number format (u8), number of sequences n (u64), length
m of the document index (u64), n lengths (i32), n byte offsets (i64), m cumulative sequence counts (i64).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from pangu.config.errors import UserError, reading
from pangu.config.files import NewFile

_MAGIC = b"MMIDIDX\0\0"
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_FORMATS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def token_format(vocab: int) -> np.dtype[np.integer]:
    """Number format of a vocabulary's ids; the bound is Megatron's."""
    return np.dtype("<u2" if vocab < 65500 else "<i4")


def bin_path(prefix: str | Path) -> Path:
    """The tokens of a prefix. Not `with_suffix`, for a prefix may hold a dot."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Writes one pair of files, one sequence per document. A context manager: the files get their names when the block
    ends without an exception, otherwise nothing of them is left. Opening, adding and closing raise OSError."""

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        self.num_tokens = 0
        self._vocab = vocab
        self._format = token_format(vocab)
        self._lengths = array("i")
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._new = [NewFile(self._bin)]

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def add(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append one document. Raises ValueError for an id outside the vocabulary."""
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab):
            raise ValueError(f"ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self._vocab}")
        self._new[0].file.write(ids.astype(self._format).tobytes())
        self._lengths.append(ids.size)
        self.num_tokens += ids.size

    def close(self) -> None:
        """Flush both files to disk and give them their names, the index last, for it makes the pair readable."""
        try:
            self._new.append(NewFile(self._idx))
            self._write_index(self._new[1].file)
            for new in self._new:
                new.finish()
            # An old index must not outlive its tokens: a kill between the two renames would pair old with new.
            self._idx.unlink(missing_ok=True)
            for new in self._new:
                new.publish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what has no name yet."""
        for new in self._new:
            new.discard()

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        stops = np.cumsum(lengths, dtype="<i8") * self._format.itemsize
        code = next(code for code, name in _FORMATS.items() if np.dtype(name) == self._format)
        file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.tobytes())
        file.write((stops - lengths * np.int64(self._format.itemsize)).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


@dataclass(frozen=True)
class IndexedTokens:
    """The memory-mapped contents of one pair of files."""

    prefix: str
    tokens: NDArray[np.integer]
    """All documents back to back, [tokens]."""
    sequence_lengths: NDArray[np.int32]
    """Tokens of each sequence, [sequences]."""
    document_index: NDArray[np.int64]
    """Number of sequences before each document and at the end, [documents + 1]."""


def open_indexed(prefix: str | Path) -> IndexedTokens:
    """Map a pair of files into memory, in constant time. Raises UserError, naming the file, if one is missing, cannot
    be read, is truncated, holds no tokens, is of another format, or does not belong to the other."""
    idx, data = idx_path(prefix), bin_path(prefix)
    with reading(prefix):
        size = data.stat().st_size
        with idx.open("rb") as file:
            header = file.read(_HEADER.size)
        number_format, num_sequences, num_documents = _parse_header(idx, header, idx.stat().st_size)
        index = np.memmap(idx, dtype=np.uint8, mode="r")
        lengths_stop = _HEADER.size + 4 * num_sequences
        offsets_stop = lengths_stop + 8 * num_sequences
        lengths = index[_HEADER.size : lengths_stop].view("<i4")
        offsets = index[lengths_stop:offsets_stop].view("<i8")
        documents = index[offsets_stop:].view("<i8")
        # The last sequence stands for all: adding up a billion lengths would take every process seconds.
        expected = int(offsets[-1]) + int(lengths[-1]) * number_format.itemsize if num_sequences else 0
        if size != expected:
            raise UserError(
                f"{data} has {size} bytes, but {idx} describes {expected}: one of them is truncated or they are"
                " not a pair; write them again with tools/preprocess_data.py"
            )
        if size == 0:
            raise UserError(f"{data} holds no tokens; the text it was made from was empty")
        if num_documents < 2 or documents[0] != 0 or documents[-1] != num_sequences:
            raise UserError(f"{idx}: its document index is damaged; write the files again")
        tokens = np.memmap(data, dtype=number_format, mode="r")
    return IndexedTokens(str(prefix), tokens, lengths, documents)


def _parse_header(idx: Path, header: bytes, size: int) -> tuple[np.dtype[np.integer], int, int]:
    """Number format, number of sequences and length of the document index."""
    if header.startswith(_OLD_MAGIC):
        raise UserError(f"{idx} is of Megatron's old 'cached' or 'lazy' kind; write it again with --dataset-impl mmap")
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise UserError(f"{idx} is not the index of a token file: it does not begin with {_MAGIC[:7].decode()}")
    if len(header) < _HEADER.size:
        raise UserError(f"{idx} is truncated: it has only {size} bytes")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{idx} has version {version}; only version 1 is known")
    if code not in _FORMATS:
        raise UserError(f"{idx} has number format {code}; token ids are one of {sorted(_FORMATS)}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size != expected:
        raise UserError(
            f"{idx} has {size} bytes, but {expected} are needed for {num_sequences} sequences: it is damaged"
        )
    return np.dtype(_FORMATS[code]), num_sequences, num_documents
