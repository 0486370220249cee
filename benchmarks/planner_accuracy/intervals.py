"""Intervals of step times that a plan predicts from the figures of a cluster file, and how many rows they contain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import NormalDist, fmean, median
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.planner_accuracy.accuracy import Fitted, predict
from benchmarks.planner_accuracy.measurements import Row, grouped, kind_of
from benchmarks.planner_accuracy.published import RULES
from pangu.report.intervals import SHARE, Interval, groups_of_kind, nearest


class Residual(NamedTuple):
    """Measured over predicted time of a row, by the bare figures of its cluster file."""

    source: str
    kind: tuple[str, str, bool]
    """Family of devices, format, whether there is a pipeline."""
    error: float
    """Logarithm of measured over predicted time."""
    tie: float | None
    """Difference of the error from that of the layout that would be picked in its sweep; None: far from it."""


def residuals_of(rows: Iterable[Row]) -> Iterator[Residual]:
    """Yield the residuals of the timed rows, one sweep after the other."""
    timed = [predict(row, Fitted()) for row in rows if row.seconds and not row.out_of_memory]
    for sweep in grouped(timed, lambda one: one.row.sweep).values():
        errors = [math.log((one.row.seconds or math.nan) / one.seconds) for one in sweep]
        least, pick = min((one.seconds, place) for place, one in enumerate(sweep))
        for place, (one, error) in enumerate(zip(sweep, errors, strict=True)):
            told = len(sweep) >= RULES.least_sweep and place != pick and one.seconds <= RULES.near * least
            kind = (*kind_of(one.row.scope), one.row.setups[0].plan.pipeline > 1)
            yield Residual(one.row.source, kind, error, abs(error - errors[pick]) if told else None)


def intervals_of(residuals: Sequence[Residual]) -> dict[str, Interval]:
    """Return the interval of each group of rows that enough sources tell of, and of all rows."""
    everyone, table = _tie(residuals), {}
    for name in dict.fromkeys(name for one in residuals for name in groups_of_kind(*one.kind)):
        group = [one for one in residuals if name in groups_of_kind(*one.kind)]
        errors = [[one.error for one in own] for own in grouped(group, attrgetter("source")).values()]
        if len(errors) >= RULES.least_sources or name == "all":
            # a plan says one time, which its interval contains
            middle, tie = median(median(one) for one in errors), _tie(group) or everyone or 0.0
            factors = min(0.0, _limit(errors, -1)), max(0.0, _limit(errors, 1)), middle, tie
            table[name] = Interval(*map(math.exp, factors), sources=len(errors), rows=len(group))
    return table


def _limit(errors: Sequence[Sequence[float]], side: Literal[-1, 1]) -> float:
    """Return the limit of a further source's errors on one side: errors are skewed, so each side has variances of its
    own, of the sources' medians about theirs, which is uncertain itself, and of a source's errors about its median."""
    medians, several = [median(one) for one in errors], [one for one in errors if len(one) > 1] or [(0.0,)]
    between = 2 * fmean(max(0.0, side * (one - median(medians))) ** 2 for one in medians)  # half of them are beyond
    within = fmean((float(np.quantile(one, NormalDist().cdf(side))) - median(one)) ** 2 for one in several)
    variance = between * (len(errors) + 1) / max(1, len(errors) - 1) + within
    return median(medians) + side * NormalDist().inv_cdf((1 + SHARE) / 2) * math.sqrt(variance)


def _tie(residuals: Iterable[Residual]) -> float | None:
    """Return the difference that `SHARE` of the ties have, where sources count alike; None if there are none."""
    ties = [(one.tie, one.source) for one in residuals if one.tie is not None]
    counts = Counter(source for _, source in ties)
    weights = [1 / counts[source] for _, source in ties]
    return float(np.quantile([tie for tie, _ in ties], SHARE, weights=weights, method="inverted_cdf")) if ties else None


def coverage(residuals: Sequence[Residual]) -> dict[str, tuple[int, int]]:
    """Return the number of rows that intervals of all other sources contain, and of all rows, by source."""
    counts = {}
    for source, own in sorted(grouped(residuals, attrgetter("source")).items()):
        if table := intervals_of([one for one in residuals if one.source != source]):
            limits = ((nearest(table, *one.kind)[1], math.exp(one.error)) for one in own)
            counts[source] = sum(one.low <= error <= one.high for one, error in limits), len(own)
    return counts
