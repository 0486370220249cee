"""Indexed token files in Megatron's format: `PREFIX.bin` (concatenated tokens) and `PREFIX.idx` (their offsets).

Layout of `.idx`, little-endian: magic (9 bytes), version (u64), number format (u8), number of sequences n (u64), length
m of the document index (u64), n lengths (i32), n byte offsets (i64), m cumulative sequence counts (i64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError, reading

MAGIC = b"MMIDIDX\0\0"
_OLD_MAGIC = b"TNTIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
FORMATS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def token_format(vocab: int) -> np.dtype[np.integer]:
    """Return the number format for a vocabulary's ids; the threshold is Megatron's."""
    return np.dtype("<u2" if vocab < 65500 else "<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the token file of a prefix. Not `with_suffix`, because a prefix may contain a dot."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the index file of a prefix."""
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class IndexedTokens:
    """Memory-mapped contents of a token file and its index."""

    prefix: str
    tokens: NDArray[np.integer]
    """Concatenated tokens of all documents, [tokens]."""
    sequence_lengths: NDArray[np.int32]
    """Number of tokens in each sequence, [sequences]."""
    document_index: NDArray[np.int64]
    """Number of sequences before each document and at the end, [documents + 1]."""


def open_indexed(prefix: str | Path) -> IndexedTokens:
    """Map a pair of files into memory, in constant time.

    Raises UserError, naming the file: missing, unreadable, truncated, without tokens, of another format, or not a pair.
    """
    idx, data = idx_path(prefix), bin_path(prefix)
    with reading(prefix):
        size = data.stat().st_size
        with idx.open("rb") as file:
            header = file.read(HEADER.size)
        number_format, num_sequences, num_documents = _parse_header(idx, header, idx.stat().st_size)
        index = np.memmap(idx, dtype=np.uint8, mode="r")
        lengths_stop = HEADER.size + 4 * num_sequences
        offsets_stop = lengths_stop + 8 * num_sequences
        lengths = index[HEADER.size : lengths_stop].view("<i4")
        offsets = index[lengths_stop:offsets_stop].view("<i8")
        documents = index[offsets_stop:].view("<i8")
        # Check the last sequence only: adding up a billion lengths would take every process seconds.
        expected = int(offsets[-1]) + int(lengths[-1]) * number_format.itemsize if num_sequences else 0
        if size != expected:
            raise UserError(
                f"{data} has {size} bytes, but {idx} describes {expected}: one of them is truncated, or they are"
                " not a pair; write them again with tools/preprocess_data.py"
            )
        if size == 0:
            raise UserError(f"{data} has no tokens, as its text was empty; write it again from another text")
        if num_documents < 2 or documents[0] != 0 or documents[-1] != num_sequences:
            raise UserError(f"{idx}: its document index is damaged; write the files again")
        tokens = np.memmap(data, dtype=number_format, mode="r")
    return IndexedTokens(str(prefix), tokens, lengths, documents)


def _parse_header(idx: Path, header: bytes, size: int) -> tuple[np.dtype[np.integer], int, int]:
    if header.startswith(_OLD_MAGIC):
        raise UserError(f"{idx} has Megatron's old 'cached' or 'lazy' format; write it again with --dataset-impl mmap")
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise UserError(f"{idx} is not the index of a token file: it does not begin with {MAGIC[:7].decode()}")
    if len(header) < HEADER.size:
        raise UserError(f"{idx} is truncated: it has only {size} bytes; copy or write it again")
    _, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{idx} has version {version}, and only version 1 is supported; write it again")
    if code not in FORMATS:
        raise UserError(f"{idx} has number format {code}, not one of {sorted(FORMATS)}; write it again")
    expected = HEADER.size + 12 * num_sequences + 8 * num_documents
    if size != expected:
        raise UserError(
            f"{idx} has {size} bytes, but {num_sequences} sequences need {expected}: it is damaged; write it again"
        )
    return np.dtype(FORMATS[code]), num_sequences, num_documents
