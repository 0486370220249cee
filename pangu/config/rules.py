"""What values have to fulfil, as checks that several groups of keys share."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.config.errors import Problem


def divisors_near(number: int, near: int, count: int = 3) -> list[int]:
    """The divisors of `number` that are nearest to `near`, in increasing order."""
    divisors = [d for d in range(1, min(number, 4 * max(near, 1)) + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - near))[:count])


def multiples_near(factor: int, near: int) -> list[int]:
    """The multiples of `factor` on either side of `near`, without 0."""
    below = near // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple > 0]


def any_of(values: list[int]) -> str:
    """Words for values that work."""
    return f"nearest that work: {', '.join(map(str, values))}"


def at_least(key: str, value: float, low: float) -> Iterator[Problem]:
    """A number below `low` is a problem, and so is one that is none."""
    if not value >= low:
        yield Problem(key, value, f"must be at least {low}")


def positive(key: str, value: float) -> Iterator[Problem]:
    """A number that is not above 0 is a problem."""
    if not value > 0:
        yield Problem(key, value, "must be above 0")


def within(key: str, value: float, low: float, high: float, open_low: bool = False) -> Iterator[Problem]:
    """A number outside of [low, high), or of (low, high), is a problem."""
    if not (low < value if open_low else low <= value) or not value < high:
        yield Problem(key, value, f"must be {'above' if open_low else 'at least'} {low:g} and below {high:g}")
