"""Files that are whole or absent, and the progress bar of making them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_OPEN_FILES = Path("/proc/self/fd")
"""The open files of this process, where the system shows them."""


class NewFile:
    """A file that gets its name when it is whole. All of it raises OSError.

    Where the file system has files without a name (Linux; not over NFS), nothing is left of one that is given up, even
    if the process is killed. Elsewhere it has a temporary name, which is left then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        unnamed = _open_unnamed(path.parent)
        self._named = unnamed is None
        self.file: BinaryIO = self._temporary.open("wb") if unnamed is None else unnamed

    def finish(self) -> None:
        """Have everything written so far on disk, under the temporary name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        if not self._named:
            self._temporary.unlink(missing_ok=True)  # of a process that was killed here and had the same number
            _give_name(self.file, self._temporary)
            self._named = True
        self.file.close()

    def publish(self) -> None:
        """Give a finished file its name, in the place of any file that has it."""
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Leave nothing of a file that is not published; nothing happens to one that is."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.file.close()
        if self._named:
            self._temporary.unlink(missing_ok=True)


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """A file without a name, if there can be one in the folder."""
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError:  # what is wrong with the folder itself is told when a file with a name is opened
        return None


def _give_name(file: BinaryIO, path: Path) -> None:
    folder = os.open(_OPEN_FILES, os.O_RDONLY)
    try:
        # without a folder to start from, os.link takes the link in /proc itself, not the file
        os.link(str(file.fileno()), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, flush it to disk and only then give it its name. Raises OSError and then leaves nothing."""
    new = NewFile(path)
    try:
        new.file.write(content)
        new.finish()
        new.publish()
    finally:
        new.discard()


def progress_bar(show: bool) -> Progress:
    """A progress bar on standard error, so that standard output stays clean for results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
