"""Suggestions in error messages: keys for a mistyped name, and values near a rejected one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable

MOST = 3
"""Largest number of suggestions."""
_DEGREES = {"cp": "context", "dp": "data", "ep": "expert", "pp": "pipeline", "sp": "sequence", "tp": "tensor"}
WORDS = {
    **{short: f"parallel {name}" for short, name in _DEGREES.items()},
    **dict.fromkeys(("vp", "vpp"), "parallel virtual_stages"),
    **dict.fromkeys(("iterations", "iters"), "steps"),
    **dict.fromkeys(("length", "seq"), "sequence"),
    **dict.fromkeys(("log", "logging"), "metrics"),
    "accumulation": "batch global size",
    "clipping": "clip",
    "dir": "output",
    "embd": "hidden",
    "epsilon": "eps",
    "eval": "validation",
    "grad": "optimizer clip",
    "head": "heads",
    "intermediate": "ffn",
    "interval": "every",
    "key": "kv",
    "layer": "layers",
    "learning": "optimizer lr",
    "microbatch": "micro batch size",
    "save": "checkpoint",
}
"""Words in other programs' settings, mapped to pangu's."""


def close_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the keys that `name` may stand for: with a similar last part, otherwise sharing most words with it."""
    everywhere = dict.fromkeys(names)
    last, lasts = name.rsplit(".", 1)[-1], {one.rsplit(".", 1)[-1] for one in everywhere}
    close = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    if spelled := [one for one in everywhere if one.rsplit(".", 1)[-1] in close]:
        return spelled
    given, last_words = (
        {ours for word in _words(part) for ours in _words(WORDS.get(word, word))} for part in (name, last)
    )
    scores = {one: _shared(given, last_words, one) for one in everywhere}
    best = max(scores.values(), default=0.0)
    return [one for one, score in scores.items() if score == best > 0][:MOST]


def _shared(given: set[str], last_words: set[str], name: str) -> float:
    """Return how well the words of a name, and of its last part, match a key: all of it, its last part, or a part."""
    every, last = set(_words(name)), set(_words(name.rsplit(".", 1)[-1]))
    if every <= given:
        return len(every)
    if last <= last_words:
        return len(last) - 0.5
    return len(last_words) - 1.5 if last_words < every else 0.0


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in increasing order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def divisors_near(number: int, near: int, works: Callable[[int], bool] = lambda divisor: True) -> list[int]:
    """Return the three divisors of `number` that work and are nearest to `near`, in increasing order."""
    nearest = sorted(filter(works, divisors(number)), key=lambda divisor: (abs(divisor - near), divisor))
    return sorted(nearest[:3])


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
