"""Intervals of step times that a plan predicts from the figures of a cluster file, and how many rows they contain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from benchmarks.planner_accuracy.accuracy import LEAST_SWEEP, Fitted, predict
from benchmarks.planner_accuracy.measurements import Row, grouped, kind_of
from pangu.report.intervals import SHARE, Interval, groups_of_kind, nearest

NEAR = 1.25
"""Layouts whose predicted time is within this factor of the fastest of their sweep tell which layouts are ties."""
LEAST_SOURCES = 3
"""Sources of a group that has an interval of its own; of two, one would be half of it."""


class Residual(NamedTuple):
    """Measured over predicted time of a row, by the bare figures of its cluster file."""

    source: str
    kind: tuple[str, str, bool]
    """Family of devices, format, whether there is a pipeline."""
    error: float
    """Logarithm of measured over predicted time."""
    tie: float | None
    """How much the error differs from that of the layout that would be picked in its sweep; None: far from it."""


def residuals_of(rows: Iterable[Row]) -> Iterator[Residual]:
    """Yield the residuals of the timed rows, one sweep after the other."""
    timed = [predict(row, Fitted()) for row in rows if row.seconds and not row.out_of_memory]
    for sweep in grouped(timed, lambda one: one.row.sweep).values():
        errors = [math.log((one.row.seconds or math.nan) / one.seconds) for one in sweep]
        least, pick = min((one.seconds, place) for place, one in enumerate(sweep))
        for place, (one, error) in enumerate(zip(sweep, errors, strict=True)):
            told = len(sweep) >= LEAST_SWEEP and place != pick and one.seconds <= NEAR * least
            kind = (*kind_of(one.row.scope), one.row.setups[0].plan.pipeline > 1)
            yield Residual(one.row.source, kind, error, abs(error - errors[pick]) if told else None)


def intervals_of(residuals: Sequence[Residual]) -> dict[str, Interval]:
    """Return the interval of each group of rows that enough sources tell of, and of all rows."""
    named = [(name, one) for one in residuals for name in groups_of_kind(*one.kind)]
    everyone = _ties(residuals)
    table = {}
    for name, pairs in grouped(named, itemgetter(0)).items():
        group = [one for _, one in pairs]
        sources = len({one.source for one in group})
        if sources >= LEAST_SOURCES or name == "all":
            errors = [(one.error, one.source) for one in group]
            low, high = (math.exp(_quantile(errors, (1 + sign * SHARE) / 2)) for sign in (-1, 1))
            tie = math.exp(_quantile(_ties(group) or everyone or errors, SHARE))
            # a plan says one time, which its interval contains
            table[name] = Interval(min(1.0, low), max(1.0, high), max(1.0, tie), sources, len(group))
    return table


def _ties(residuals: Iterable[Residual]) -> list[tuple[float, str]]:
    return [(one.tie, one.source) for one in residuals if one.tie is not None]


def _quantile(values: Sequence[tuple[float, str]], share: float) -> float:
    """Return a quantile of values with their sources, which count alike."""
    counts = Counter(source for _, source in values)
    weights = [1 / counts[source] for _, source in values]
    return float(np.quantile([value for value, _ in values], share, weights=weights, method="inverted_cdf"))


def coverage(residuals: Sequence[Residual]) -> dict[str, tuple[int, int]]:
    """Return the number of rows that intervals of all other sources contain, and of all rows, by source."""
    counts = {}
    for source, own in sorted(grouped(residuals, attrgetter("source")).items()):
        if table := intervals_of([one for one in residuals if one.source != source]):
            limits = [nearest(table, *one.kind)[1] for one in own]
            inside = sum(one.low <= math.exp(row.error) <= one.high for one, row in zip(limits, own, strict=True))
            counts[source] = inside, len(own)
    return counts
