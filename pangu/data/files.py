"""Files that are whole or absent, and the progress bar of making them."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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


def progress_bar(show: bool) -> Progress:
    """A progress bar on standard error, so that standard output stays clean for results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not show)
