"""Pictures and traces of a pipeline's timeline, simulated or measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pangu.config.errors import writing
from pangu.config.files import write_atomically
from pangu.pipeline.actions import COMPUTE, Kind
from pangu.pipeline.simulate import Event, Timeline
from pangu.pipeline.theory import bubble

LOOKS = {
    Kind.FORWARD: ("forward", 0.35, ""),
    Kind.BACKWARD: ("backward", 0.95, ""),
    Kind.BACKWARD_INPUT: ("backward for the input", 0.95, ""),
    Kind.BACKWARD_WEIGHT: ("backward for the weights", 0.55, "////"),
}
"""Name, strength of the micro-batch's colour, and hatch of each kind of computation."""
INCHES_PER_ACTION = 0.17
"""Room for three digits at FONT_SIZE."""
FONT_SIZE = 5
IDLE = "0.9"
"""Grey of a stage that computes nothing."""


def draw(timeline: Timeline, stem: Path, says: str, measured: bool = False) -> None:
    """Draw a timeline to `stem`.svg and `stem`.png: a row per stage, a box per forward and backward.

    A box has the colour and the number of its micro-batch and, where stages have several chunks, a letter: a for the
    stage's first chunk. The title has the bubble, and the formula's for equal times (theory.bubble). Time is drawn in
    milliseconds if it was measured, otherwise in hundredths of the step.

    Args:
        timeline: what to draw.
        stem: path without suffix.
        says: where the times come from, e.g. `simulated`.
        measured: the times are seconds.

    Raises UserError if a file cannot be written.
    """
    unit = "ms" if measured else "% of the step"
    timeline = _scaled(timeline, 1000.0 if measured else 100 / timeline.makespan)
    durations = [event.stop - event.start for events in timeline.computing for event in events]
    short = max(sorted(durations)[len(durations) // 4], timeline.makespan * 1e-4)  # typical of the shortest kind
    width = min(100.0, max(9.0, INCHES_PER_ACTION * timeline.makespan / short))  # inches of the rows
    whole, height = width + 1.0, 0.32 * timeline.schedule.stages + 1.5
    figure = Figure(figsize=(whole, height), dpi=150)
    FigureCanvasAgg(figure)  # not pyplot, which keeps every figure and may look for a display
    # laid out by hand: an automatic layout draws the thousands of numbers twice
    figure.subplots_adjust(left=0.8 / whole, right=1 - 0.2 / whole, bottom=0.9 / height, top=1 - 0.6 / height)
    axes = figure.add_subplot()
    _draw_boxes(axes, timeline, inches=width / timeline.makespan)
    axes.set(xlabel=f"time ({unit})", xlim=(0, timeline.makespan), ylim=(timeline.schedule.stages, 0))
    axes.set_yticks([stage + 0.5 for stage in range(timeline.schedule.stages)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(timeline.schedule.stages)])
    axes.set_title(_title(timeline, says), loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    kinds = {event.action.kind for events in timeline.computing for event in events}
    handles = [
        Patch(facecolor=_tint((0.3, 0.3, 0.3), strength), hatch=hatch, edgecolor="white", label=name)
        for kind, (name, strength, hatch) in LOOKS.items()
        if kind in kinds
    ]
    handles.append(Patch(facecolor=IDLE, label="idle or waiting for a message"))
    if timeline.schedule.virtual > 1:
        handles.append(Patch(alpha=0, label="3b: micro-batch 3, second chunk"))
    look = {"fontsize": "small", "handlelength": 1.5, "columnspacing": 1.2, "frameon": False}
    figure.legend(handles=handles, loc="lower left", ncols=len(handles), **look)
    for suffix in ("svg", "png"):
        path = stem.parent / f"{stem.name}.{suffix}"
        with writing(path), rc_context({"svg.fonttype": "none", "hatch.linewidth": 0.4}):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            figure.savefig(content, format=suffix)
            write_atomically(path, content.getvalue())


def _scaled(timeline: Timeline, factor: float) -> Timeline:
    """The same from time 0 on, in another unit."""
    start = timeline.start
    events = (e._replace(start=(e.start - start) * factor, stop=(e.stop - start) * factor) for e in timeline.events)
    return replace(timeline, events=tuple(events))


def _title(timeline: Timeline, says: str) -> str:
    schedule = timeline.schedule
    chunks = f" of {schedule.virtual} chunks" if schedule.virtual > 1 else ""
    formula = bubble(schedule.name, schedule.stages, schedule.virtual, schedule.micro_batches)
    theory = "no formula" if formula is None else f"{formula:.1%} by formula for equal times"
    return (
        f"{schedule.name}, {schedule.stages} stages{chunks}, {schedule.micro_batches} micro-batches, {says}\n"
        f"bubble {timeline.bubble:.1%} ({theory})"
    )


def _draw_boxes(axes: Axes, timeline: Timeline, inches: float) -> None:
    """Put the boxes, and the numbers of those that have room, into the axes; `inches` per unit of time."""
    palette = [to_rgb(colour) for colour in colormaps["tab10"].colors]  # type: ignore[attr-defined]
    boxes: dict[Kind, list[Event]] = {}
    for stage, events in enumerate(timeline.computing):
        axes.axhspan(stage + 0.04, stage + 0.96, color=IDLE, linewidth=0)
        for event in events:
            boxes.setdefault(event.action.kind, []).append(event)
    for kind, of_kind in boxes.items():
        _, strength, hatch = LOOKS[kind]
        corners = []
        for event in of_kind:
            left, right = event.start - timeline.start, event.stop - timeline.start
            top, bottom = event.stage + 0.04, event.stage + 0.96
            corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            label = _label(event, timeline)
            if (right - left) * inches > 0.6 * FONT_SIZE / 72 * len(label):
                axes.text(
                    (left + right) / 2,
                    event.stage + 0.5,
                    label,
                    color="white" if strength > 0.9 else "black",
                    fontsize=FONT_SIZE,
                    ha="center",
                    va="center",
                )
        colours = [_tint(palette[(event.action.micro or 0) % len(palette)], strength) for event in of_kind]
        axes.add_collection(
            PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.4, hatch=hatch or None)
        )


def _label(event: Event, timeline: Timeline) -> str:
    """Number of the micro-batch, and the letter of the stage's chunk if it has several."""
    schedule = timeline.schedule
    if schedule.virtual == 1:
        return str(event.action.micro)
    nth = schedule.stage_of[: event.action.chunk].count(event.stage)
    return f"{event.action.micro}{chr(ord('a') + nth)}"


def _tint(colour: tuple[float, float, float], strength: float) -> tuple[float, float, float]:
    """The colour mixed with white."""
    red, green, blue = (1 - strength * (1 - part) for part in colour)
    return red, green, blue


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline (in seconds) as a trace that ui.perfetto.dev and chrome://tracing open: a track per stage;
    messages and all that is not computing above it, for they overlap. Raises UserError if it cannot be written.

    The format is Chrome's Trace Event Format: X is a span, b and e begin and end one that may overlap others.
    """
    records: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in range(timeline.schedule.stages)
    ]
    for number, event in enumerate(timeline.events):
        action = event.action
        args = {"chunk": action.chunk, "micro": action.micro, "peer": action.peer}
        micro = "" if action.micro is None else f" {action.micro}"
        start, duration = (event.start - timeline.start) * 1e6, (event.stop - event.start) * 1e6
        record = {"name": f"{action.kind}{micro}", "cat": str(action.kind), "pid": 0, "tid": event.stage, "args": args}
        if action.kind in COMPUTE:
            records.append({**record, "ph": "X", "ts": start, "dur": duration})
        else:
            records.append({**record, "ph": "b", "id": number, "ts": start})
            records.append({**record, "ph": "e", "id": number, "ts": start + duration})
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}).encode())
