"""What a single value may be, written into the type of its field: `Annotated[int, Bounds(least=1)]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated
from unicodedata import category

LARGEST_INT = 2**63 - 1
"""What tensors, files and libraries count in."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of single precision, in which most numbers are used."""
SMALLEST_FLOAT = 2.0**-126
"""The same: what is below it may be 0 there."""


@dataclass(frozen=True)
class Bounds:
    """Where a number lies. Numbers without bounds of their own are finite and fit their format all the same."""

    least: float | None = None
    """Smallest value."""
    above: float | None = None
    """Largest value that is too small."""
    most: float | None = None
    """Largest value."""
    below: float | None = None
    """Smallest value that is too large."""

    def broken(self, value: float) -> str | None:
        """The rule that a number breaks, in words."""
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
        """`at least 0 and below 1`."""
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {bound:.10g}" for word, bound in words if bound is not None)


@dataclass(frozen=True)
class Encodable:
    """A text that a run's files, which are UTF-8, can hold."""

    def broken(self, value: str) -> str | None:
        """Return the rule that a text breaks, in words."""
        if any(category(character) == "Cs" for character in value):  # Python's stand-ins for other bytes
            return "must be UTF-8, and these bytes are not; rename it, or set LC_ALL=C.UTF-8 if this shell misreads it"
        return None


@dataclass(frozen=True)
class Filled(Encodable):
    """A text with something in it, e.g. a path."""

    def broken(self, value: str) -> str | None:
        """Return the rule that a text breaks, in words."""
        if rule := super().broken(value):
            return rule
        if not value.strip():
            return "must not be empty"
        if any(category(character) == "Cc" for character in value):
            return "must not hold control characters"
        return None

    def __str__(self) -> str:
        return "not empty"


FREE: dict[object, Bounds | Encodable] = {int: Bounds(), float: Bounds(), str: Encodable()}
"""Bounds of numbers and texts that say nothing else."""

Count = Annotated[int, Bounds(least=1)]
Natural = Annotated[int, Bounds(least=0)]
ExitStatus = Annotated[int, Bounds(least=0, most=255)]
Length = Annotated[int, Bounds(least=1, most=2**31 - 1)]
"""Of a tensor's dimension or a part of it."""
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, below=1)]
"""A probability, or the decay of a moment."""
Filename = Annotated[str, Filled()]
