"""Writer of indexed token files; see `indexed`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from pangu.common.files import NewFile
from pangu.data.indexed import FORMATS, HEADER, MAGIC, bin_path, idx_path, token_format

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


class IndexedWriter:
    """Context manager that writes a pair of files, one sequence per document, and names them only on success."""

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        """Open the token file under a temporary name. Opening, adding and closing raise OSError."""
        self.num_tokens = 0
        self._vocab = vocab
        self._format = token_format(vocab)
        self._lengths = array("i")
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._new = [NewFile(self._bin)]

    @property
    def num_documents(self) -> int:
        """Return the number of documents added."""
        return len(self._lengths)

    def add(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Append one document. Raises ValueError for an id outside the vocabulary."""
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab):
            raise ValueError(f"ids {ids.min()} to {ids.max()} are outside a vocabulary of {self._vocab}")
        self._new[0].file.write(ids.astype(self._format).tobytes())
        self._lengths.append(ids.size)
        self.num_tokens += ids.size

    def close(self) -> None:
        """Flush both files to disk and give them their names, the index last, because it makes the pair readable."""
        try:
            self._new.append(NewFile(self._idx))
            write_index(self._new[1].file, self._format, np.array(self._lengths, dtype="<i4"))
            for new in self._new:
                new.finish()
            # An old index must not outlive its tokens: a kill between the two renames would pair old with new.
            self._idx.unlink(missing_ok=True)
            for new in self._new:
                new.publish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the files that are not published yet."""
        for new in self._new:
            new.discard()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Publish the files, or leave nothing of them after an exception."""
        if kind is None:
            self.close()
        else:
            self.discard()
