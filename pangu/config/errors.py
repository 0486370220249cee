"""Errors that are the user's to mend, and the one form in which they are told."""

from __future__ import annotations

import errno
import logging
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_SHOWN = 200
"""Characters of a value in a message."""
MOST_DIGITS = 4300
"""Digits of an integer that Python reads by default."""
_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxother = 60


# control characters but for newline and tab, line separators, directions of writing, halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with each character that a terminal would obey instead of showing written as its escape, `\\x1b`."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class PrintableFormatter(logging.Formatter):
    """Log messages as they are, made printable: they quote names and values of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class UserError(Exception):
    """Something outside the program is wrong: a key, a file, the number of devices, the disk.

    The message is for a person: it names the key or file, the value, the rule and what would work. Commands print it
    without a traceback and end with a status that is not 0.
    """


@dataclass(frozen=True)
class Problem:
    """One contradiction in a configuration."""

    key: str
    """Dotted name of the key, or several joined by commas."""
    value: object
    """What the user gave."""
    rule: str
    """What a value has to fulfil."""
    works: str = ""
    """The nearest values that work."""

    def __str__(self) -> str:
        text = f"{shown(self.key)} = {shown(self.value)}: {self.rule}"
        return f"{text}; {self.works}" if self.works else text


def shown(value: object, depth: int = 20) -> str:
    """A value of a user or of a foreign file, as YAML has it: what is long or deep is cut, control characters are
    escaped."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, (list, tuple, Mapping)) and not depth:
        text = "..."
    elif isinstance(value, (list, tuple)):
        text = f"[{_joined(shown(one, depth - 1) for one in value)}]"
    elif isinstance(value, Mapping):
        text = f"{{{_joined(f'{shown(key)}: {shown(one, depth - 1)}' for key, one in value.items())}}}"
    else:
        text = (value[: MOST_SHOWN + 1] if isinstance(value, str) else _SHORT.repr(value)) or "''"
    text = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _joined(texts: Iterator[str]) -> str:
    """As many of them as are shown; a file of a few bytes may stand for more than there is time for."""
    parts: list[str] = []
    while sum(map(len, parts)) <= MOST_SHOWN and (text := next(texts, None)) is not None:
        parts.append(text)
    return ", ".join(parts)


class LocalError(UserError):
    """An error that this process alone knows of, so that it must speak even if it is not the first."""


class LostError(LocalError):
    """Other processes of the run are gone or stuck. The same command may succeed."""


class ConfigError(UserError):
    """All contradictions of one configuration, reported at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{count} in the configuration:\n{lines}")


_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose a folder on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or choose a folder on another disk",
    errno.EACCES: "no permission to write there: choose a folder of yours",
    errno.EPERM: "no permission to write there: choose a folder of yours",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name is in the way: choose another folder",
}


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names `target` and says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"cannot write {target}: {advice}") from error


@contextmanager
def reading(source: object, *errors: type[Exception], rule: str = "cannot be read", works: str = "") -> Iterator[None]:
    """Turn an OSError of the block, or one of `errors`, into a UserError: `source`, the rule, and the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, *errors)):
            raise
        cause = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            other = error.filename is not None and str(error.filename) != str(source)
            cause = f"{error.filename}: {error.strerror}" if other else error.strerror
        if "set_int_max_str_digits" in cause:
            cause = f"an integer of more than {MOST_DIGITS:,} digits"
        text = f"{source}: {rule} ({shown(cause)})"
        raise UserError(f"{text}; {works}" if works else text) from error


# How long a process of a run waits, besides parallel.timeout_s, where another one may be gone or slow.
FIRST_SPEAKS_SECONDS = 30.0
"""For the first process to say why all fail: the launcher ends all processes as soon as one has failed."""
SILENCE_SECONDS = 2.0
"""For the others to notice a stuck rank as well: all begin to wait for it within about a step."""
STORE_SECONDS = 3.0
"""For the store to answer; torch itself would wait for it without end."""
SAVE_SECONDS = 60.0
"""At the end of a run with an error, for a checkpoint that is being written; not where a rank is silent, whose part
will not come."""
LAUNCHER_SECONDS = 3.0
"""For the launcher to end this process, where others join the run: it looks every 0.1 s whether they have come."""
