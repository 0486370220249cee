"""Checks of tokenizer files from untrusted sources, and conversion of tokenizer library errors to UserError."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError, shown
from pangu.common.files import read_json_object

MOST_GROWTH = 100
"""Maximum number of characters that a tokenizer may substitute for one; Unicode normalization produces at most 18."""
CANNOT_ENCODE = "cannot encode text"
_STEPS = ("normalizers", "decoders", "pretokenizers")


@contextmanager
def library_errors(path: object, rule: str) -> Iterator[None]:
    """Convert any error of a tokenizer library to UserError, including Rust panics, which are no `Exception`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: {rule} ({shown(str(error) or type(error).__name__)})") from error


def largest_id(ids: Iterable[int]) -> int:
    """Return the largest id of a vocabulary. Raises ValueError if there is none or it does not fit in 32 bits."""
    largest = max(ids, default=-1)
    if not 0 <= largest < 2**31 - 1:
        raise ValueError("it has no pieces" if largest < 0 else f"it has the id {largest}; ids are less than 2^31 - 1")
    return largest


def check_growth(path: Path) -> None:
    """Raise UserError for a tokenizer.json, if present, that expands short texts to very long ones."""
    # three steps that each replace a letter by a thousand turn a line into gigabytes
    config = {}
    with suppress(UserError):  # the library says what is wrong with the file
        config = read_json_object(path)
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        with library_errors(path, f"its {key} cannot be read"):
            growth = _growth(config.get(key))
        if growth > MOST_GROWTH:
            raise UserError(
                f"{path}: its {key} replaces a character with up to {growth:.3g}; at most {MOST_GROWTH} are allowed"
            )


def _growth(step: Any) -> float:
    """Return the maximum number of characters that a step of a tokenizer.json substitutes for one."""
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") == "Replace":
        pattern = step["pattern"].get("String") or ""
        # An empty pattern, or a regular expression, may match between any two characters
        return max(1.0, len(step["content"]) / len(pattern) if pattern else 1.0 + len(step["content"]))
    if step.get("type") == "Precompiled":
        return charsmap_growth(base64.b64decode(step["precompiled_charsmap"] or ""))
    return prod(_growth(part) for key in _STEPS for part in step.get(key) or ())


def charsmap_growth(charsmap: bytes) -> float:
    """Return the maximum number of bytes that SentencePiece's normalization substitutes for a character."""
    # layout: size of a search trie (4 bytes), the trie, the zero-terminated replacements
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0"))))
