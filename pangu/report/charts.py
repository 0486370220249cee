"""Line charts: geometry of axes, curves and marks, which page.html draws as SVG.

Not by matplotlib, whose SVG has no tooltips and does not follow a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pangu.metrics.columns import Series

WIDTH, HEIGHT = 600, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 10, 34
MOST_POINTS = 500
"""Largest number of points of a line: more are averaged with their neighbors."""


@dataclass(frozen=True)
class Line:
    """Curve of a chart."""

    name: str
    colour: str
    x: Series
    y: Series
    style: str = "line"
    """Style: `line`; `faint`: thin and pale; `dots`: dashed, with a dot at each point."""


@dataclass(frozen=True)
class Chart:
    """Curves over one axis."""

    title: str
    lines: Sequence[Line]
    text: Callable[[float], str]
    """Format of y values for people."""
    from_zero: bool = False
    marks: Sequence[tuple[float, str, str]] = field(default_factory=tuple)
    """Vertical lines: position, color and label."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers (1, 2 or 5 times a power of ten) within a range."""
    if not high > low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (unit * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thin(line: Line) -> tuple[Series, Series]:
    """Return the finite points of a line, averaged to at most `MOST_POINTS`."""
    good = np.isfinite(line.x) & np.isfinite(line.y)
    x, y = line.x[good], line.y[good]
    if len(x) <= MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MOST_POINTS + 1).astype(np.int64)[:-1]
    counts = np.diff([*edges, len(x)])
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def draw(chart: Chart, x_text: Callable[[float], str], x_title: str) -> dict[str, Any] | None:
    """Return what page.html draws, in pixels; None if no line has two points."""
    points = [(line, *thin(line)) for line in chart.lines]
    points = [(line, x, y) for line, x, y in points if len(x) > 1 or (len(x) and line.style == "dots")]
    if not any(len(x) > 1 for _, x, _ in points):
        return None
    low, high = _range(np.concatenate([y for _, _, y in points]), chart.from_zero)
    every = np.concatenate([x for _, x, _ in points])
    start, stop = float(every.min()), float(every.max()) if every.max() > every.min() else float(every.min()) + 1

    def place(x: float) -> float:
        return round(LEFT + (x - start) / (stop - start) * (WIDTH - LEFT - RIGHT), 1)

    def height(y: float) -> float:
        return round(TOP + (high - min(max(y, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    curves = []
    for line, x, y in points:
        pairs = list(zip(x.tolist(), y.tolist(), strict=True))
        dots = [(place(a), height(b), f"{chart.text(b)} at {x_text(a)}") for a, b in pairs if line.style == "dots"]
        curves.append((line, " ".join(f"{place(a)},{height(b)}" for a, b in pairs), dots))
    return {
        "title": chart.title,
        "x_title": x_title,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "y_ticks": [(height(y), chart.text(y)) for y in ticks(low, high)],
        "x_ticks": [(place(x), x_text(x)) for x in ticks(start, stop)],
        "marks": [(place(x), colour, says) for x, colour, says in chart.marks if start <= x <= stop],
        "curves": curves,
    }


def _range(values: Series, from_zero: bool) -> tuple[float, float]:
    """Return the range of the y-axis, without rare peaks such as loss spikes or first steps."""
    low, high = float(values.min()), float(values.max())
    usual = float(np.percentile(values, 98))
    middle = float(np.median(values))
    if high - middle > 3 * (usual - middle) > 0:
        high = usual + 0.5 * (usual - middle)
    low = min(0.0, low) if from_zero else low
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if from_zero and low == 0 else low - room), high + room
