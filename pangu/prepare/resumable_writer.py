"""Writer of indexed token files of any size; after a kill, a later process resumes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.common.files import NewFile, flush
from pangu.data.indexed import bin_path, idx_path, token_format
from pangu.data.indexed_writer import write_index
from pangu.prepare.manifest import BLOCK, file_checksums

_COUNTS = ("num_documents", "num_tokens", "num_bytes")


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

    def add(self, tokens: NDArray[np.integer], lengths: NDArray[np.int32], num_bytes: int) -> None:
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
        return np.memmap(self._lengths, dtype="<i4", mode="r")

    def publish(self) -> dict[str, dict[str, Any]]:
        """Rename a committed pair (index last, as it makes the pair readable); return the manifest's file records."""
        for file in self._files:
            file.close()
        tokens, idx = bin_path(self.prefix), idx_path(self.prefix)
        new = NewFile(idx)
        try:
            write_index(new.file, self._format, self.lengths())
            new.finish()
            idx.unlink(missing_ok=True)  # an old index must not outlive its tokens
            self._tokens.replace(tokens)
            new.publish()
        finally:
            new.discard()
        flush(tokens.parent)
        checksums = {tokens: self._checksums.all(), idx: file_checksums(idx).all()}
        return {path.name: {"bytes": path.stat().st_size, "blake2b": sums} for path, sums in checksums.items()}

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _reopened(path: Path, size: int) -> Any:
    """Open a file for appending after its first `size` bytes; later ones may be incomplete and are dropped."""
    path.touch()
    file = path.open("r+b")
    if file.seek(0, os.SEEK_END) < size:
        raise OSError(f"{path} is shorter than what was written; remove {path.parent} to start over")
    file.truncate(size)
    file.seek(size)
    return file
