"""Errors that the user can fix, and the single form in which they are reported."""

from __future__ import annotations

import errno
import logging
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pangu.common.commands import as_typed

MOST_SHOWN = 200
"""Longest value in a message, in characters."""
MOST_DIGITS = 4300
"""Longest integer that Python parses by default, in digits."""
_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxother = 60
# control characters but for newline and tab, line separators, directions of writing, halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with the control characters that a terminal would obey replaced by escapes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class PrintableFormatter(logging.Formatter):
    """Log formatter that escapes control characters, since log messages quote names and values from files."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record with commands as typed, and control characters escaped."""
        return printable(as_typed(super().format(record)))


class UserError(Exception):
    """Error outside the program: a key, a file, the number of devices, the disk.

    The message is for a person: it names the key or file, the value, the rule and values that work. Commands print it
    without a traceback and end with a non-zero status.
    """


@dataclass(frozen=True)
class Problem:
    """Contradiction in a configuration."""

    key: str
    """Dotted name of the key, or several joined by commas."""
    value: object
    """Value given by the user."""
    rule: str
    """Rule that the value breaks."""
    fix: str = ""
    """Nearest values that work."""

    def __str__(self) -> str:
        """Return the line shown to the user."""
        text = f"{shown(self.key)} = {shown(self.value)}: {self.rule}"
        return f"{text}; {self.fix}" if self.fix else text


def shown(value: object, depth: int = 20) -> str:
    """Return a value of a user or of a foreign file as YAML, truncated, with control characters escaped."""
    value = vars(value) if is_dataclass(value) else value
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
    """Join texts up to the length that is shown; a file of a few bytes may expand to more than there is time for."""
    parts: list[str] = []
    while sum(map(len, parts)) <= MOST_SHOWN and (text := next(texts, None)) is not None:
        parts.append(text)
    return ", ".join(parts)


class LocalError(UserError):
    """Error that only this process knows of, so that it must report it even if it is not the first process."""


class DeviceError(UserError):
    """Error raised when a device of the run computes wrongly; the message names its rank and host."""


class LostError(LocalError):
    """Error raised when other processes of the run are gone or stuck; the same command may succeed."""

    keep_state: Callable[[Any], None] | None = None
    """Function that keeps the state of this rank for the next epoch (`training.survivors`); None: there is no state."""


class ConfigError(UserError):
    """All contradictions of one configuration, reported at once."""

    def __init__(self, problems: list[Problem]) -> None:
        """Build the message from a list of problems."""
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{count} in the configuration:\n{lines}")


_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose a folder on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or choose a folder on another disk",
    errno.EACCES: "no permission to write there: choose a folder that you own",
    errno.EPERM: "no permission to write there: choose a folder that you own",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file with that name exists: choose another folder",
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
def reading(source: object, *errors: type[Exception], rule: str = "cannot be read", fix: str = "") -> Iterator[None]:
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
            cause = f"an integer with more than {MOST_DIGITS:,} digits"
        text = f"{source}: {rule} ({shown(cause)})"
        raise UserError(f"{text}; {fix}" if fix else text) from error


_ASKED, _FREE = r"ried to allocate ([\d.]+ \w+)", r"([\d.]+ \w+)(?: is)? free"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of torch, which has several types for it, says that a device or its host is full."""
    is_named = type(error).__name__ == "OutOfMemoryError"
    return is_named or re.search("out of memory|can't allocate memory", str(error)) is not None


@contextmanager
def allocating(where: Callable[[], str], fix: str) -> Iterator[None]:
    """Turn an out-of-memory error of torch in the block into a LocalError: `where()`, torch's sizes, and `fix`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        asked, free = re.search(_ASKED, str(error)), re.search(_FREE, str(error))
        sizes = (f", {asked[1]} requested" if asked else "") + (f", {free[1]} free" if free else "")
        raise LocalError(f"{where()}: out of memory{sizes}; {fix}") from error


# How long a process of a run waits, besides parallel.timeout_s, where another one may be gone or slow.
FIRST_SPEAKS_SECONDS = 30.0
"""Time for the first process to report the error: the launcher ends all processes as soon as one has failed."""
SILENCE_SECONDS = 2.0
"""Time for the other ranks to notice a stuck rank: all start to wait for it within about a step."""
STORE_SECONDS = 3.0
"""Time for the store to answer; torch itself would wait for it without end."""
SAVE_SECONDS = 60.0
"""Time for a pending checkpoint at the end of a failed run, unless a rank whose part would be missing hangs."""
LAUNCHER_SECONDS = 3.0
"""Time for the launcher to end this process, where others join the run: it looks every 0.1 s whether they have come."""
