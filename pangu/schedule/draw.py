"""Plots of a pipeline timeline, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pangu.metrics.plots import write_figure
from pangu.schedule.actions import SENDS, Action, Kind
from pangu.schedule.schedule import Schedule
from pangu.schedule.simulate import Gap, bubble_by_formula
from pangu.schedule.simulate import gaps as gaps_of
from pangu.schedule.timeline import Event, Timeline

LOOKS = {
    Kind.FORWARD: ("forward", 0.35, ""),
    Kind.BACKWARD: ("backward", 0.95, ""),
    Kind.BACKWARD_INPUT: ("backward for the input", 0.95, ""),
    Kind.BACKWARD_WEIGHT: ("backward for the weights", 0.55, "////"),
}
"""Label, strength of the micro-batch color, and hatch per kind of computation."""
OTHER = "other work"
# Other work is that on parameters and sends in a measured step, and the time between actions. Hatches are made of
# lines: an SVG spells out each dot of a dotted one.
GAPS: dict[str | None, tuple[str, str, str]] = {
    Kind.RECV_ACTIVATION: ("waiting for an activation", "white", "----"),
    Kind.RECV_GRADIENT: ("waiting for a gradient", "white", "xxxx"),
    OTHER: (OTHER, "0.65", ""),
    None: ("no work left", "0.9", ""),
}
"""Label, color and hatch of idle times by the kind of message that the stage waits for."""
MARKERS = {"^": ("sent to a stage above", 0.82), "v": ("sent to a stage below", 0.93)}
"""Markers of messages, which point to the receiving stage: their meaning, and their height in a stage's row."""
PALETTE = [to_rgb(colour) for colour in colormaps["tab10"].colors]  # type: ignore[attr-defined]
INCHES_PER_ACTION = 0.17
"""Width of an action, which has room for three digits at FONT_SIZE."""
FONT_SIZE = 5
SVG: dict[Any, Any] = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "hatch.linewidth": 0.4}
"""Matplotlib settings that keep text as text in SVG files, with one font name rather than all fallbacks."""
TOP, BOTTOM = 0.04, 0.74
"""Edges of the boxes in a stage's row, which is 1 high."""


def draw(timeline: Timeline, stem: Path, says: str, measured: bool = False) -> None:
    """Draw a timeline to `stem`.svg and `stem`.png: a row per stage, with a box per forward and backward pass.

    A box has the color and the number of its micro-batch and, if stages have several chunks, a letter (a for the first
    chunk of the stage). Gaps between boxes show what the stage waits for (micro-batch and sending stage), markers below
    them each message that it sends. The title has the bubble, that of `bubble_by_formula`, and the source of the times,
    `says`. Units are milliseconds if `measured` (times in seconds), else percent of the step. Raise `UserError` if a
    file cannot be written.
    """
    unit = "ms" if measured else "% of the step"
    timeline = _scaled(timeline, 1000.0 if measured else 100 / timeline.makespan)
    durations = [event.stop - event.start for events in timeline.computing for event in events]
    short = max(sorted(durations)[len(durations) // 4], timeline.makespan * 1e-4)  # typical of the shortest kind
    width = min(100.0, max(9.0, INCHES_PER_ACTION * timeline.makespan / short))  # inches of the rows
    whole, height = width + 1.0, 0.4 * timeline.schedule.stages + 1.7
    figure = Figure(figsize=(whole, height), dpi=150)
    # manual layout: an automatic one would draw the thousands of numbers twice
    figure.subplots_adjust(left=0.8 / whole, right=1 - 0.2 / whole, bottom=1.1 / height, top=1 - 0.6 / height)
    axes = figure.add_subplot()
    inches = width / timeline.makespan
    _draw_computing(axes, timeline, inches)
    gaps = gaps_of(timeline, measured)
    _draw_gaps(axes, timeline.schedule, gaps, inches)
    _draw_messages(axes, timeline, measured)
    axes.set(xlabel=f"time ({unit})", xlim=(0, timeline.makespan), ylim=(timeline.schedule.stages, 0))
    axes.set_yticks([stage + (TOP + BOTTOM) / 2 for stage in range(timeline.schedule.stages)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(timeline.schedule.stages)])
    axes.set_title(_title(timeline, says), loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    _draw_legend(figure, timeline, gaps)
    for suffix in ("svg", "png"):
        with rc_context(SVG):
            write_figure(figure, stem.parent / f"{stem.name}.{suffix}")


def _scaled(timeline: Timeline, factor: float) -> Timeline:
    start = timeline.start
    events = (e._replace(start=(e.start - start) * factor, stop=(e.stop - start) * factor) for e in timeline.events)
    return replace(timeline, events=tuple(events))


def _title(timeline: Timeline, says: str) -> str:
    schedule = timeline.schedule
    chunks = f" of {schedule.virtual_stages} chunks" if schedule.virtual_stages > 1 else ""
    formula = bubble_by_formula(schedule.name, schedule.stages, schedule.virtual_stages, schedule.micro_batches)
    theory = "no formula" if formula is None else f"{formula:.1%} by formula for equal times"
    return (
        f"{schedule.name}, {schedule.stages} stages{chunks}, {schedule.micro_batches} micro-batches, {says}\n"
        f"bubble {timeline.bubble:.1%} ({theory})"
    )


def _draw_computing(axes: Axes, timeline: Timeline, inches: float) -> None:
    boxes: dict[Kind, list[Event]] = {}
    for event in (event for events in timeline.computing for event in events):
        boxes.setdefault(event.action.kind, []).append(event)
        label = _label(event.action, timeline.schedule)
        _write(axes, event, inches, label, color="white" if LOOKS[event.action.kind][1] > 0.9 else "black")
    for kind, events in boxes.items():
        _, strength, hatch = LOOKS[kind]
        colours = [_tint(_colour(event.action), strength) for event in events]
        look: dict[str, Any] = {"facecolors": colours, "edgecolors": "white", "linewidths": 0.4, "hatch": hatch or None}
        axes.add_collection(PolyCollection(_corners(events), **look))


def _draw_gaps(axes: Axes, schedule: Schedule, gaps: Sequence[Gap], inches: float) -> None:
    boxes: dict[str | None, list[Gap]] = {}
    for gap in gaps:
        boxes.setdefault(_kind(gap), []).append(gap)
        if gap.awaited is not None:
            assert gap.then is not None
            label = _label(gap.then, schedule)
            chunk = gap.then.chunk + (1 if gap.awaited[0] is Kind.RECV_GRADIENT else -1)
            peer = schedule.stage_of[chunk]
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # letters on a hatch are hard to read
            _write(axes, gap, inches, f"{label} from stage {peer}", label, bbox=white)
    for kind, alike in boxes.items():
        _, colour, hatch = GAPS[kind]
        look: dict[str, Any] = {"facecolors": colour, "edgecolors": "0.7", "hatch": hatch or None}
        axes.add_collection(PolyCollection(_corners(alike), linewidths=0.4 if hatch else 0.0, zorder=0.5, **look))


def _draw_messages(axes: Axes, timeline: Timeline, measured: bool) -> None:
    for marker, (_, height) in MARKERS.items():
        sends = [event for event in timeline.events if event.action.kind in SENDS and _marker(event) == marker]
        colours = [_colour(event.action) for event in sends]
        begins, heights = [event.start for event in sends], [event.stage + height for event in sends]
        if not measured:
            axes.hlines(heights, begins, [event.stop for event in sends], colours, linewidth=1.0)
        axes.scatter(begins, heights, s=9, c=colours, marker=marker, linewidths=0, clip_on=False, zorder=3)


def _marker(send: Event) -> str:
    assert send.action.peer is not None
    return "v" if send.action.peer > send.stage else "^"


def _kind(gap: Gap) -> str | None:
    if gap.awaited is not None:
        return gap.awaited[0]
    return None if gap.then is None else OTHER


def _corners(spans: Iterable[Event | Gap]) -> list[list[tuple[float, float]]]:
    return [
        [(span.start, y), (span.stop, y), (span.stop, z), (span.start, z)]
        for span in spans
        for y, z in [(span.stage + TOP, span.stage + BOTTOM)]
    ]


def _write(axes: Axes, span: Event | Gap, inches: float, *labels: str, **look: Any) -> None:
    for label in labels:
        if (span.stop - span.start) * inches > 0.6 * FONT_SIZE / 72 * len(label):
            place = (span.start + span.stop) / 2, span.stage + (TOP + BOTTOM) / 2
            axes.text(*place, label, fontsize=FONT_SIZE, ha="center", va="center", **look)
            return


def _label(action: Action, schedule: Schedule) -> str:
    if schedule.virtual_stages == 1:
        return str(action.micro)
    nth, letters = schedule.stage_of[: action.chunk].count(schedule.stage_of[action.chunk]), ""
    while nth >= 0:  # a to z, aa to zz, ...
        letters = chr(ord("a") + nth % 26) + letters
        nth = nth // 26 - 1
    return f"{action.micro}{letters}"


def _colour(action: Action) -> tuple[float, float, float]:
    return PALETTE[(action.micro or 0) % len(PALETTE)]


def _draw_legend(figure: Figure, timeline: Timeline, gaps: Sequence[Gap]) -> None:
    kinds = {event.action.kind for events in timeline.computing for event in events}
    computed = [
        Patch(facecolor=_tint((0.3, 0.3, 0.3), strength), hatch=hatch, edgecolor="white", label=name)
        for kind, (name, strength, hatch) in LOOKS.items()
        if kind in kinds
    ]
    has_chunks = timeline.schedule.virtual_stages > 1
    example = "3b: micro-batch 3, the stage's second chunk" if has_chunks else "3: micro-batch 3"
    computed.append(Patch(alpha=0, label=example))
    kinds_of_gaps = {_kind(gap) for gap in gaps}
    otherwise: list[Artist] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="0.7", linewidth=0.4, label=name)
        for kind, (name, colour, hatch) in GAPS.items()
        if kind in kinds_of_gaps
    ]
    sent = {_marker(event) for event in timeline.events if event.action.kind in SENDS}
    otherwise += [
        Line2D([], [], color="0.3", marker=marker, markersize=4, linestyle="none", label=name)
        for marker, (name, _) in MARKERS.items()
        if marker in sent
    ]
    look = {"fontsize": "small", "handlelength": 1.5, "columnspacing": 1.2, "frameon": False, "borderaxespad": 0.0}
    for handles, inches in ((computed, 0.3), (otherwise, 0.08)):
        place = (0.1 / figure.get_figwidth(), inches / figure.get_figheight())
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=max(1, len(handles)), **look)


def _tint(colour: tuple[float, float, float], strength: float) -> tuple[float, float, float]:
    red, green, blue = (1 - strength * (1 - part) for part in colour)
    return red, green, blue
