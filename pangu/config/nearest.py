"""The nearest values that work."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def divisors_near(number: int, near: int, count: int = 3) -> list[int]:
    """The divisors of `number` that are nearest to `near`, in increasing order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))
    return sorted(divisors[:count])


def multiples_near(factor: int, near: int) -> list[int]:
    """The multiples of `factor` on either side of `near`, without 0."""
    below = near // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple > 0]


def any_of(values: list[int]) -> str:
    """How they are told."""
    return f"nearest that work: {', '.join(map(str, values))}"


def close_names(name: str, names: Iterable[str]) -> list[str]:
    """The dotted names whose last part is much like that of `name`."""
    everywhere = dict.fromkeys(names)
    wanted, lasts = name.rsplit(".", 1)[-1], {one.rsplit(".", 1)[-1] for one in everywhere}
    close = difflib.get_close_matches(wanted, lasts, n=1, cutoff=0.8)
    return [one for one in everywhere if one.rsplit(".", 1)[-1] in close]
