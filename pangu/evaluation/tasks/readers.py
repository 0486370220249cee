"""Reading the files of benchmarks, with errors that name the file and the line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pangu.config.errors import UserError
from pangu.config.files import parse_json


def read_text(path: Path) -> str:
    """All of a file, without a byte-order mark. Raises UserError if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 0) and value of each line that is not blank. Raises UserError for one that is not JSON."""
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    for number, line in enumerate(lines):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number + 1}: not JSON: {error}") from error
        yield number, value


@contextmanager
def of_the_benchmark(path: Path) -> Iterator[None]:
    """Turn what reading a value of another shape raises into a UserError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not in this benchmark's format ({type(error).__name__}: {error}); it takes the published files"
        ) from error


def find(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """All files of `folder` that match the first pattern that matches any. Raises UserError if none does."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; it should hold the files of the benchmark")
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return found
    raise UserError(f"{folder}: there is no {' or '.join(patterns)} here; the benchmark's own files belong there")
