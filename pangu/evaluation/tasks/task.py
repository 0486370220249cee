"""What a benchmark is to this package, and how its files are read, with errors that name the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pangu.config.errors import UserError
from pangu.config.files import parse_json
from pangu.evaluation.generation import Sampling
from pangu.evaluation.tasks.measures import Measure

SLOT = "{answer}"
"""Where the answer stands in a template."""


@dataclass(frozen=True)
class Item:
    """One question of a benchmark."""

    id: str
    """Unique in its task."""
    fields: Mapping[str, str]
    """What stands in the template's other slots."""
    answers: tuple[str, ...]
    """Where answers are ranked, all that may stand in the template's slot; otherwise those that are right."""
    right: int = 0
    """Number of the right one, with which examples are shown."""
    words: int = 0
    """Words that are scored, if perplexity is told per word as well."""


@dataclass(frozen=True)
class Task:
    """A benchmark."""

    name: str
    read: Callable[[Path], Iterator[Item]]
    """Reads one of its files."""
    template: str
    """A question, with `{answer}` and the fields of its items."""
    few: int = 0
    """The paper's number of examples in its few-shot setting (table 7; the first where it gives two)."""
    method: Literal["rank", "write", "word", "text"] = "rank"
    """`rank`: of the template filled with each answer, the one with the lowest perplexity is chosen; `write`: the model
    goes on where the slot stands; `word`: the one answer is scored behind what stands before it; `text`: all is scored,
    in windows."""
    test: tuple[str, ...] = ()
    """Patterns of the names of the files that are measured on: all that match the first pattern that matches any."""
    train: tuple[str, ...] = ()
    """The same for the files that examples are taken from; none: the task is done without examples."""
    choices: int | None = None
    """The right answer is ranked among so many, the others taken at random; None: among all."""
    decoding: Sampling | None = None
    """Of `write` (table 8); `max_tokens` is not published: what answers need."""
    measure: Measure | None = None
    """Of `write`."""
    shortened: str = ""
    """Field that loses its end where a prompt of `write` is longer than the model's window."""


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
def published_format(path: Path) -> Iterator[None]:
    """Turn what reading a value of another shape raises into a UserError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not in this benchmark's format ({type(error).__name__}: {error}); it takes the published files"
        ) from error


def find_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """All files of `folder` that match the first pattern that matches any. Raises UserError if none does."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; it should hold the files of the benchmark")
    for pattern in patterns:
        if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return paths
    raise UserError(f"{folder}: there is no {' or '.join(patterns)} here; the benchmark's own files belong there")
