"""Writers of indexed token files (see `data.indexed`): one in a block, and one that a later process resumes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pangu.common.files import flush, remove
from pangu.data.indexed import FORMATS, HEADER, MAGIC, bin_path, idx_path, token_format
from pangu.prepare.manifest import BLOCK, file_checksums

_COUNTS = ("num_documents", "num_tokens", "num_bytes")
_AT_ONCE = 1 << 20  # lengths held in memory at once while an index is written


def write_index(file: BinaryIO, number_format: np.dtype[np.integer], lengths: NDArray[np.int32]) -> None:
    """Write an `.idx` file for documents of these lengths, each one sequence."""
    code = next(code for code, name in FORMATS.items() if np.dtype(name) == number_format)
    file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
    parts = range(0, len(lengths), _AT_ONCE)
    for begin in parts:
        file.write(lengths[begin : begin + _AT_ONCE].astype("<i4").tobytes())
    start = 0
    for begin in parts:
        stops = start + np.cumsum(lengths[begin : begin + _AT_ONCE], dtype="<i8") * number_format.itemsize
        file.write(np.concatenate([np.array([start], dtype="<i8"), stops[:-1]]).tobytes())
        start = int(stops[-1])
    for begin in range(0, len(lengths) + 1, _AT_ONCE):
        file.write(np.arange(begin, min(begin + _AT_ONCE, len(lengths) + 1), dtype="<i8").tobytes())


class ResumableWriter:
    """Writer of one pair of files, kept in a separate folder until complete. Uses constant memory. Raises OSError."""

    def __init__(self, prefix: str, folder: Path, vocab: int, committed: dict[str, Any]) -> None:
        """Open the files; `committed` is the result of the last `commit`, {} to start over.

        `num_bytes` counts the source text, and the checksums are those of the full blocks of tokens.
        """
        self.prefix = prefix
        self.num_documents, self.num_tokens, self.num_bytes = (committed.get(name, 0) for name in _COUNTS)
        self._format = token_format(vocab)
        self._tokens, self._lengths = (folder / f"{Path(prefix).name}.{kind}" for kind in ("tokens", "lengths"))
        if not self._tokens.exists() and bin_path(prefix).exists() and self.num_tokens:
            bin_path(prefix).replace(self._tokens)  # it was killed between giving names to the two files
        size = self.num_tokens * self._format.itemsize
        self._files = [_reopened(self._tokens, size), _reopened(self._lengths, 4 * self.num_documents)]
        start = size // BLOCK * BLOCK
        self._checksums = file_checksums(self._tokens, start, committed.get("checksums"))

    def extend(self, tokens: NDArray[np.integer], lengths: NDArray[np.int32], num_bytes: int) -> None:
        """Append documents: their concatenated ids, [tokens], made from `num_bytes` bytes of text."""
        content = tokens.astype(self._format, copy=False).tobytes()
        self._checksums.update(content)
        self._files[0].write(content)
        self._files[1].write(lengths.astype("<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)
        self.num_bytes += num_bytes

    def commit(self) -> dict[str, Any]:
        """Flush everything to disk and return the state needed to resume from here."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return {name: getattr(self, name) for name in _COUNTS} | {"checksums": list(self._checksums.finished)}

    def lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens of each document, memory-mapped."""
        return np.memmap(self._lengths, dtype="<i4", mode="r") if self.num_documents else np.empty(0, np.int32)

    def publish(self) -> dict[str, dict[str, Any]]:
        """Rename a committed pair (index last, as it makes the pair readable); return the manifest's file records."""
        for file in self._files:
            file.close()
        tokens, idx, new = bin_path(self.prefix), idx_path(self.prefix), self._tokens.with_suffix(".idx")
        with new.open("wb") as file:
            write_index(file, self._format, self.lengths())
        flush(new)
        idx.unlink(missing_ok=True)  # an old index must not outlive its tokens
        self._tokens.replace(tokens)
        new.replace(idx)
        flush(tokens.parent)
        checksums = {tokens: self._checksums.all(), idx: file_checksums(idx).all()}
        return {path.name: {"bytes": path.stat().st_size, "blake2b": sums} for path, sums in checksums.items()}

    def close(self) -> None:
        """Close the files, without an error: closing flushes, which fails again on a full disk."""
        for file in self._files:
            with suppress(OSError):
                file.close()


class IndexedWriter(ResumableWriter, AbstractContextManager["IndexedWriter"]):
    """Context manager that writes a pair of files, one sequence per document, and names them only on success."""

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        """Open the token file under a temporary name. Opening, adding and closing raise OSError."""
        self._vocab = vocab
        self._folder = Path(prefix).with_name(f".{Path(prefix).name}.partial")
        remove(self._folder)
        self._folder.mkdir(parents=True)
        super().__init__(str(prefix), self._folder, vocab, {})

    def add(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append one document. Raises ValueError for an id outside the vocabulary."""
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab):
            raise ValueError(f"ids {ids.min()} to {ids.max()} are outside a vocabulary of {self._vocab}")
        self.extend(ids, np.array([ids.size], dtype=np.int32), 0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Publish the files, or leave nothing of them after an exception."""
        try:
            if kind is None:
                self.commit()
                self.publish()
        finally:
            self.close()
            remove(self._folder)


def _reopened(path: Path, size: int) -> Any:
    """Open a file for appending after its first `size` bytes; later ones may be incomplete and are dropped."""
    path.touch()
    file = path.open("r+b")
    if file.seek(0, os.SEEK_END) < size:
        raise OSError(f"{path} is shorter than when it was written; remove {path.parent} to start over")
    file.truncate(size)
    file.seek(size)
    return file
