"""Definition of benchmarks, and reading of their files with errors that name file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pangu.common.errors import UserError
from pangu.common.files import parse_json
from pangu.evaluation.generation import Sampling
from pangu.tasks.measures import Measure

SLOT = "{answer}"
"""Slot of the answer in a template."""


@dataclass(frozen=True)
class Item:
    """Question of a benchmark."""

    id: str
    """Id, unique in its task."""
    fields: Mapping[str, str]
    """Texts for the template's other slots."""
    answers: tuple[str, ...]
    """Candidates for the slot where answers are ranked; otherwise the accepted answers."""
    right: int = 0
    """Index of the right answer, which examples show."""
    words: int = 0
    """Number of scored words, if perplexity per word is reported."""


@dataclass(frozen=True)
class Task:
    """Definition of a benchmark."""

    name: str
    read: Callable[[Path], Iterator[Item]]
    """Reader of one of its files."""
    template: str
    """Template of a question, with `{answer}` and the fields of its items."""
    few: int = 0
    """Number of examples in the paper's few-shot setting (table 7; the first where it gives two)."""
    method: Literal["rank", "write", "word", "text"] = "rank"
    """Method. `rank`: choose the answer with the lowest perplexity of the filled template; `write`: the model generates
    the slot; `word`: score the one answer after its context; `text`: score the full text, in windows."""
    test: Sequence[str] = ()
    """Patterns of test file names; all files that match the first successful pattern are used."""
    train: Sequence[str] = ()
    """Patterns of the files for examples; empty: the task has no examples."""
    choices: int | None = None
    """Number of ranked candidates, the wrong ones taken at random; None: all."""
    decoding: Sampling | None = None
    """Sampling of `write` (table 8); `max_tokens` is not published: as long as answers need."""
    measure: Measure | None = None
    """Measure of `write`."""
    shortened: str = ""
    """Field that is truncated where a prompt of `write` is longer than the model's window."""
    published: Mapping[str, Sequence[Sequence[float] | None]] = field(default_factory=dict)
    """Published figures by measure, see `results.PUBLISHED`."""


def read_text(path: Path) -> str:
    """Return a file's text, without a byte-order mark. Raises UserError if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield index (from 0) and value of each non-blank line. Raises UserError for one that is not JSON."""
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    for number, line in enumerate(lines):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number + 1}: not JSON: {error}") from error
        yield number, value


@contextmanager
def published_format(path: Path) -> Iterator[None]:
    """Turn errors from values of unexpected shape into a UserError that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not in the format of this benchmark ({type(error).__name__}: {error}); use the published files"
        ) from error


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of `folder` that match the first successful pattern. Raises UserError if none does."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; put the files of the benchmark there")
    for pattern in patterns:
        if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return paths
    raise UserError(f"{folder}: no {' or '.join(patterns)} here; put the published files of the benchmark there")
