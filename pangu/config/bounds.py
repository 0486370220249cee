"""Bounds of single values, written into the type of a field: `Annotated[int, Bounds(least=1)]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated
from unicodedata import category

LARGEST_INT = 2**63 - 1
"""Largest int64, the type in which tensors, files and libraries count."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Largest fp32 number; most values are used in single precision."""
SMALLEST_FLOAT = 2.0**-126
"""Smallest normal fp32 number; smaller ones may be flushed to 0."""


@dataclass(frozen=True)
class Bounds:
    """Range of a number; without explicit bounds a number must still be finite and fit its format."""

    least: float | None = None
    """Inclusive lower bound."""
    above: float | None = None
    """Exclusive lower bound."""
    most: float | None = None
    """Inclusive upper bound."""
    below: float | None = None
    """Exclusive upper bound."""

    def broken(self, value: float) -> str | None:
        """Return the rule that a number breaks, as text for a message; None if it is valid."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        fits = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        if not fits:
            return f"must be {self}"
        if self.above == 0 and value < SMALLEST_FLOAT:
            return f"must be a number of at least {SMALLEST_FLOAT:.10g}"
        largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
        return None if abs(value) <= largest else f"must be a number of at most {largest:.10g}"

    def __str__(self) -> str:
        """Return the bounds as text, e.g. `at least 0 and below 1`."""
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {bound:.10g}" for word, bound in words if bound is not None)


@dataclass(frozen=True)
class Encodable:
    """Text that the UTF-8 files of a run can hold."""

    def broken(self, value: str) -> str | None:
        """Return the rule that a text breaks, as text for a message; None if it is valid."""
        if any(category(character) == "Cs" for character in value):  # Python's stand-ins for other bytes
            return "must be valid UTF-8; rename it, or set LC_ALL=C.UTF-8 if the shell misreads it"
        return None


@dataclass(frozen=True)
class Filled(Encodable):
    """Non-empty text without control characters, e.g. a path."""

    def broken(self, value: str) -> str | None:
        """Return the rule that a text breaks, as text for a message; None if it is valid."""
        if rule := super().broken(value):
            return rule
        if not value.strip():
            return "must not be empty"
        if any(category(character) == "Cc" for character in value):
            return "must not contain control characters"
        return None

    def __str__(self) -> str:
        """Return the rule in words."""
        return "not empty"


FREE: dict[object, Bounds | Encodable] = {int: Bounds(), float: Bounds(), str: Encodable()}
"""Bounds of numbers and texts that declare none."""

Count = Annotated[int, Bounds(least=1)]
Natural = Annotated[int, Bounds(least=0)]
ExitStatus = Annotated[int, Bounds(least=0, most=255)]
Length = Annotated[int, Bounds(least=1, most=2**31 - 1)]
"""Size of a tensor dimension or of a part of it."""
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, below=1)]
"""Probability, or decay rate of a moment."""
Filename = Annotated[str, Filled()]
