"""Checks of tokenizer files, which may come from strangers, and one message for what a library raises about them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

from pangu.config.errors import UserError, shown
from pangu.config.files import read_json_object

MOST_GROWTH = 100
"""Characters that a tokenizer may put in place of one. The longest that Unicode's normalization writes is 18."""
CANNOT_ENCODE = "cannot encode a text"
_STEPS = ("normalizers", "decoders", "pretokenizers")


@contextmanager
def library_errors(path: object, rule: str) -> Iterator[None]:
    """Turn whatever a tokenizer library raises into a UserError. What its Rust code panics about is no Exception."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path}: {rule} ({shown(str(error) or type(error).__name__)})") from error


def largest_id(ids: Iterable[int]) -> int:
    """The largest of a vocabulary's ids. Raises ValueError if there is none, or it is no 32-bit integer."""
    largest = max(ids, default=-1)
    if not 0 <= largest < 2**31 - 1:
        raise ValueError("it has no pieces" if largest < 0 else f"it has the id {largest}; ids are less than 2^31 - 1")
    return largest


def check_growth(path: Path) -> None:
    """Raise UserError for a tokenizer.json, if there is one, that writes very long texts for short ones: three steps
    that replace a letter by a thousand fill gigabytes with a line."""
    config = {}
    with suppress(UserError):  # the library says what is wrong with the file
        config = read_json_object(path)
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        with library_errors(path, f"its {key} cannot be read"):
            growth = _growth(config.get(key))
        if growth > MOST_GROWTH:
            raise UserError(
                f"{path}: its {key} writes up to {growth:.3g} characters for one; at most {MOST_GROWTH} are allowed"
            )


def _growth(step: Any) -> float:
    """Characters that a step of a tokenizer.json writes for one, at most."""
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
    """Bytes that SentencePiece's normalization writes for a character, at most: its map is the size of a search tree,
    the tree, and the replacements, each with a zero behind it."""
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return float(max(map(len, replacements.split(b"\0"))))
