"""Line charts as self-contained SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pangu.common.errors import printable
from pangu.metrics.plots import Series

WIDTH, HEIGHT = 600, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 34
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


def escape(text: object) -> str:
    """Return text escaped for HTML, in attributes too; control characters as their escapes."""
    return html.escape(printable(str(text)), quote=True)


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


def draw(chart: Chart, x_text: Callable[[float], str], x_title: str) -> str:
    """Return the chart as an HTML figure; an empty text if no line has two points."""
    points = [(line, *thin(line)) for line in chart.lines]
    points = [(line, x, y) for line, x, y in points if len(x) > 1 or (len(x) and line.style == "dots")]
    if not any(len(x) > 1 for _, x, _ in points):
        return ""
    low, high = _range(np.concatenate([y for _, _, y in points]), chart.from_zero)
    every = np.concatenate([x for _, x, _ in points])
    start, stop = float(every.min()), float(every.max()) if every.max() > every.min() else float(every.min()) + 1

    def place(x: float) -> float:
        return LEFT + (x - start) / (stop - start) * (WIDTH - LEFT - RIGHT)

    def height(y: float) -> float:
        return TOP + (high - min(max(y, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    shapes = [_tick(LEFT, height(y), chart.text(y), along_x=False) for y in ticks(low, high)]
    shapes += [_tick(place(x), HEIGHT - BOTTOM, x_text(x), along_x=True) for x in ticks(start, stop)]
    shapes += [
        f'<line class="mark" x1="{place(x):.1f}" x2="{place(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        f'stroke="{escape(colour)}"><title>{escape(says)}</title></line>'
        for x, colour, says in chart.marks
        if start <= x <= stop
    ]
    for line, x, y in points:
        shapes.append(_curve(line, [(place(a), height(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]))
        if line.style == "dots":
            shapes += [
                f'<circle cx="{place(a):.1f}" cy="{height(b):.1f}" r="2.6" fill="{escape(line.colour)}">'
                f"<title>{escape(line.name)}: {escape(chart.text(b))} at {escape(x_text(a))}</title></circle>"
                for a, b in zip(x.tolist(), y.tolist(), strict=True)
            ]
    shapes.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_title)}</text>')
    title = escape(chart.title)
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(shapes)}</svg></figure>"
    )


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


def _tick(x: float, y: float, says: str, along_x: bool) -> str:
    text = escape(says)
    if along_x:
        return f'<text class="axis" x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{text}</text>'
    grid = f'<line class="grid" x1="{x}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{grid}<text class="axis" x="{x - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'


def _curve(line: Line, points: Sequence[tuple[float, float]]) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    name, colour = escape(line.name), escape(line.colour)
    return (
        f'<polyline class="{escape(line.style)}" points="{joined}" stroke="{colour}"><title>{name}</title></polyline>'
    )
