"""Files that are whole or absent, and plain words for the ways in which writing them fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pangu.config.errors import UserError

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose a folder on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or choose a folder on another disk",
    errno.EACCES: "no permission to write there: choose a folder of yours",
    errno.EPERM: "no permission to write there: choose a folder of yours",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name is in the way: choose another folder",
}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk and rename it. Raises OSError and then leaves nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names `target` and says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"cannot write {target}: {advice}") from error


def progress_bar(show: bool) -> Progress:
    """A progress bar on standard error, so that standard output stays clean for results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
