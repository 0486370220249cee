"""Verdict on two runs: lower loss at equal tokens, higher speed, and the keys in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pangu.metrics.columns import smooth
from pangu.metrics.text import compact
from pangu.report.runs import Run, differing

ROUNDING = 1e-5
"""Largest relative difference of losses that layouts, kernels and devices cause by rounding alone."""
_SIMILAR = 0.01
"""Relative difference of speeds below which none is called faster."""
_MOST_KEYS = 8


def compare(first: Run, second: Run) -> list[str]:
    """Return sentences about two runs; empty if they have no figures in common."""
    return [*_losses(first, second), *_validation(first, second), *_speed(first, second), *_keys(first, second)]


def _pairs(first: Run, second: Run, column: str) -> dict[float, tuple[float, float]]:
    """Return the values of both runs by the tokens trained on, where both are finite."""
    one, two = (dict(zip(run.columns["tokens"], run.columns[column], strict=True)) for run in (first, second))
    found = {float(tokens): (float(value), float(two[tokens])) for tokens, value in one.items() if tokens in two}
    return {tokens: pair for tokens, pair in found.items() if all(map(math.isfinite, pair))}


def _losses(first: Run, second: Run) -> Iterator[str]:
    """Compare the losses of all common steps, then the smoothed ones at the last number of tokens that both have."""
    pairs = _pairs(first, second, "loss")
    if not pairs:
        return
    worst = max(abs(one - two) / max(abs(one), abs(two), 1e-30) for one, two in pairs.values())
    if worst <= ROUNDING:
        equal = "bit for bit" if worst == 0 else f"up to rounding (relative difference at most {worst:.1e})"
        yield f"Loss: equal {equal} in all {len(pairs):,} common steps."
        return
    tokens = max(pairs)
    smoothed = [float(smooth(run.columns["loss"])[run.columns["tokens"] == tokens][-1]) for run in (first, second)]
    yield f"{_better('Loss', first, second, smoothed, tokens)} Single steps differ by up to {100 * worst:.2g}%."


def _validation(first: Run, second: Run) -> Iterator[str]:
    """Compare the last validation losses at equal tokens."""
    if pairs := _pairs(first, second, "validation_loss"):
        yield _better("Validation loss", first, second, pairs[max(pairs)], max(pairs))


def _better(what: str, first: Run, second: Run, values: Sequence[float], tokens: float) -> str:
    low, high = (f"{value:.4f}" for value in sorted(values))
    if low == high:
        return f"{what}: equal, {low} after {compact(tokens)} tokens."
    name = (first if values[0] < values[1] else second).name
    return f"{what}: {name} is better, {low} against {high} after {compact(tokens)} tokens."


def _speed(first: Run, second: Run) -> Iterator[str]:
    rates = [run.median("tokens_per_s") for run in (first, second)]
    if all(math.isfinite(rate) and rate > 0 for rate in rates):
        slow, fast = sorted(rates)
        if fast / slow < 1 + _SIMILAR:
            yield f"Speed: equal within {_SIMILAR:.0%}, {compact(fast)} tokens/s."
        else:
            name = (first if rates[0] == fast else second).name
            yield f"Speed: {name} is {fast / slow:.3g} times as fast, {compact(fast)} against {compact(slow)} tokens/s."


def _keys(first: Run, second: Run) -> Iterator[str]:
    keys = [f"{key} ({one} / {two})" for key, (one, two) in differing([first, second]).items()]
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    yield f"Configuration: {', '.join(keys[:_MOST_KEYS]) or 'the same keys'}{more}."
