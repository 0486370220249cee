"""Values near a rejected one, which error messages suggest instead."""

from __future__ import annotations

import math
from collections.abc import Callable


def divisors_near(number: int, near: int, works: Callable[[int], bool] = lambda divisor: True) -> list[int]:
    """Return the three divisors of `number` that work and are nearest to `near`, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))
    return sorted([*filter(works, divisors)][:3])


def multiples_near(factor: int, near: int) -> list[int]:
    """Return the multiples of `factor` on either side of `near`, without 0."""
    below = near // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple > 0]


def either(values: list[int]) -> str:
    """Return values as text: `1, 2 or 4`."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def any_of(values: list[int]) -> str:
    """Return the suggestion for an error message."""
    return f"nearest valid values: {', '.join(map(str, values))}"
