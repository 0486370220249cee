"""Writes indexed token files of any size, which a kill interrupts and a later process goes on with."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.config.files import NewFile, flush
from pangu.data.indexed import bin_path, idx_path, token_format
from pangu.data.indexed_writer import write_index
from pangu.data.manifest import BLOCK, file_checksums


@dataclass(frozen=True)
class Written:
    """What a writer has on disk."""

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    """Of text."""
    checksums: list[str] = field(default_factory=list)
    """Of the full blocks of tokens."""


class ResumableWriter:
    """Tokens and lengths of one pair of files, in a folder beside it until they are all there. Memory does not grow
    with them. All of it raises OSError."""

    def __init__(self, prefix: str, folder: Path, vocab: int, committed: dict[str, Any]) -> None:
        """`committed`: what `commit` returned; {} to begin anew."""
        self.prefix = prefix
        state = Written(**committed)
        self._format = token_format(vocab)
        self._folder = folder
        self._tokens, self._lengths = (folder / f"{Path(prefix).name}.{kind}" for kind in ("tokens", "lengths"))
        if not self._tokens.exists() and bin_path(prefix).exists() and state.num_tokens:
            bin_path(prefix).replace(self._tokens)  # it was killed between giving names to the two files
        size = state.num_tokens * self._format.itemsize
        self._files = [_reopened(self._tokens, size), _reopened(self._lengths, 4 * state.num_documents)]
        start = size // BLOCK * BLOCK
        self._checksums = file_checksums(self._tokens, start, state.checksums)
        self.num_documents, self.num_tokens, self.num_bytes = state.num_documents, state.num_tokens, state.num_bytes

    def add(self, tokens: NDArray[np.integer], lengths: NDArray[np.int32], num_bytes: int) -> None:
        """Append documents, [all their tokens] of the vocabulary's ids, made from so many bytes of text."""
        content = tokens.astype(self._format, copy=False).tobytes()
        self._checksums.update(content)
        self._files[0].write(content)
        self._files[1].write(lengths.astype("<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)
        self.num_bytes += num_bytes

    def commit(self) -> dict[str, Any]:
        """Have all on disk; what has to be known to go on from here."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return asdict(Written(self.num_documents, self.num_tokens, self.num_bytes, self._checksums.finished))

    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, mapped into memory."""
        return np.memmap(self._lengths, dtype="<i4", mode="r")

    def publish(self) -> dict[str, dict[str, Any]]:
        """Give a committed pair its names, the index last, for it makes the pair readable; the manifest's record of
        each file."""
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
        for file in self._files:
            file.close()


def _reopened(path: Path, size: int) -> Any:
    """A file to append to, of which only the first `size` bytes are known to be whole."""
    path.touch()
    file = path.open("r+b")
    if file.seek(0, os.SEEK_END) < size:
        raise OSError(f"{path} has lost what was written there; remove {path.parent} to begin anew")
    file.truncate(size)
    file.seek(size)
    return file
