"""Errors of the file system, told so that the user can mend them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pangu.config.errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Full disk, missing permission and the like while `path` is written become a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; mend that or choose another run folder (train.output)"
        ) from error
