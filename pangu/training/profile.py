"""Profile of a step: time by category on each rank, trace and picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from pangu.collectives.reduce import all_reduce, gather_objects, largest
from pangu.common.errors import writing
from pangu.common.files import write_atomically
from pangu.schedule.actions import COMPUTE, MESSAGES, SENDS, Action, Durations, Kind
from pangu.schedule.check import Message, message_of
from pangu.schedule.timeline import Event, Timeline
from pangu.topology.experts import GROUPS as EXPERT_GROUPS
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import ActiveRecording, RecordedSpan, Recording
from pangu.training.step import Trainer

INTERLUDE = "interlude"
"""Name of spans that belong to no step."""
PARTS = ("compute", "tensor", "pipeline", "bubble", "data", "update", "expert", "host", "loading", "logging")
"""Categories of a step's time: the terms of a forecast, in which communication is exposed time of the messages and
`bubble` is waiting for ranks that are late; waiting for batches; the rest around a step. A profile counts a device's
wait for the host (`host`) as `compute`."""
WORDS = ("update", "loading", "logging", INTERLUDE)
"""Names of spans that are no action and wait for no collective."""
TERM_OF = {
    "context": "tensor",
    "ends": "pipeline",
    **dict.fromkeys(("replicas", "shard", "gather", "copies"), "data"),
    **dict.fromkeys(EXPERT_GROUPS[1:], "data"),
    "world": "update",
}
"""Category of an axis's messages, if its name differs."""
PROFILED = 10
"""Number of the process's step that is profiled; its last one, if it makes fewer."""
TRACED = 64
"""Number of leading ranks whose spans are sent to the others, besides those of the first pipeline."""


class RankProfile(NamedTuple):
    """Profile of one rank, times in seconds."""

    parts: dict[str, float]
    """Time by category (`PARTS`); the sum is the step time."""
    exposed: dict[str, float]
    """Exposed time by axis, in which computation waited for its messages although all ranks had arrived."""
    hidden: dict[str, float]
    """Overlapped time by axis: its collectives ran, all ranks having arrived, before they were waited for. Unknown for
    messages between stages, for those across steps, and for those that other streams wait for."""
    recording: Recording | None
    """Recorded spans; None: this rank is not traced."""


def breakdown(recording: Recording, came: Mapping[str, Sequence[float]], sent: Mapping[Message, float]) -> RankProfile:
    """Assign every moment of a rank's step to a category.

    Args:
        recording: Spans, in which the last one of a message is that of waiting for it.
        came: Time of the last rank's arrival at each collective, by axis.
        sent: Time when each message between stages left.
    """
    self_times = [span.stop - span.start for span in recording.spans]
    for span in recording.spans:
        if span.parent is not None:
            self_times[span.parent] -= span.stop - span.start
    profile = RankProfile(dict.fromkeys(PARTS, 0.0), {}, {}, recording)
    for place in counted(recording.spans):
        span, seconds = recording.spans[place], self_times[place]
        axis, begins = axis_of(span), span.start
        if span.message is not None:
            begins, (_, ended) = came[span.what][span.message], recording.messages[span.what][span.message]
            hidden = max(0.0, min(ended, span.start) - begins)
            profile.hidden[span.what] = profile.hidden.get(span.what, 0.0) + hidden
        elif waits(span, recording.spans):
            begins = sent.get(message_of(span.what), span.start)
        waited = min(max(0.0, begins - span.start), seconds)
        profile.parts["bubble"] += waited
        profile.parts[part_of(span)] += seconds - waited
        if axis is not None:
            profile.exposed[axis] = profile.exposed.get(axis, 0.0) + seconds - waited
    return profile


def counted(spans: Sequence[RecordedSpan]) -> Iterator[int]:
    """Yield the indices of spans outside interludes."""
    left_out: set[int] = set()
    for place, span in enumerate(spans):
        if span.what == INTERLUDE or span.parent in left_out:
            left_out.add(place)
        else:
            yield place


def axis_of(span: RecordedSpan) -> str | None:
    """Return the axis whose messages a span waits for or posts, if any."""
    if isinstance(span.what, Action):
        return "pipeline" if span.what.kind in MESSAGES else None
    return None if span.what in WORDS else str(span.what)


def part_of(span: RecordedSpan) -> str:
    """Return the category of a span, once all ranks have arrived."""
    axis = axis_of(span)
    if axis is not None:
        return TERM_OF.get(axis, axis)
    if isinstance(span.what, Action):
        return "compute" if span.what.kind in COMPUTE else "data"
    return str(span.what)


def waits(span: RecordedSpan, spans: Sequence[RecordedSpan]) -> bool:
    """Return whether a span is the time in which another action waits for a message between stages."""
    return isinstance(span.what, Action) and span.parent is not None and isinstance(spans[span.parent].what, Action)


def events_of(stage: int, spans: Sequence[RecordedSpan]) -> list[Event]:
    """Return the actions of a stage, without the time that forward or backward waits for its message."""
    events: dict[Action, Event] = {}
    places: dict[int, Action] = {}
    for place in counted(spans):
        span = spans[place]
        if waits(span, spans):
            assert span.parent is not None
            action = places[span.parent]
            events[action] = events[action]._replace(start=span.stop)
        elif isinstance(span.what, Action) and span.what not in events:  # a send may be waited for at the end
            places[place] = span.what
            events[span.what] = Event(stage, span.what, span.start, span.stop)
    return list(events.values())


@dataclass(frozen=True)
class Profile:
    """Profile of one step on all ranks."""

    step: int
    ranks: list[RankProfile]
    timeline: Timeline
    """Timeline of the first pipeline."""
    expected: dict[str, float] | None = None
    """Forecast of the times by category."""

    @staticmethod
    def begin(mesh: Mesh) -> None:
        """Start recording on this rank."""
        # clocks of different machines differ: all ranks begin together, and each counts from there
        all_reduce(torch.zeros((), device=mesh.device), mesh.group("world"))
        mesh.recorder.active = ActiveRecording("logging", mesh.device)

    @classmethod
    def of(cls, trainer: Trainer, recording: Recording, expected: dict[str, float] | None = None) -> Profile:
        """Combine the recordings of all ranks, which call this together."""
        mesh = trainer.mesh
        came = {axis: [when for when, _ in messages] for axis, messages in recording.messages.items()}
        for axis in mesh.groups:  # in the order in which all ranks have them
            if axis in came:
                times = torch.tensor(came[axis], dtype=torch.float64, device=mesh.device)
                came[axis] = largest(times, mesh.group(axis)).tolist()
        sends = [
            (message_of(span.what), span.start)
            for span in (recording.spans[place] for place in counted(recording.spans))
            if isinstance(span.what, Action) and span.what.kind in SENDS
        ]
        all_sends = gather_objects(dict(reversed(sends)), mesh.group("pipeline"))  # the first span of a send is its own
        rank = breakdown(recording, came, {message: when for sent in all_sends for message, when in sent.items()})
        first_pipeline = mesh.layout.peers(0, "pipeline")
        if mesh.rank >= TRACED and mesh.rank not in first_pipeline:
            rank = rank._replace(recording=None)
        ranks: list[RankProfile] = gather_objects(rank, mesh.group("world"))
        stages = [ranks[first].recording for first in first_pipeline]
        events = [events_of(stage, one.spans) for stage, one in enumerate(stages) if one is not None]
        timeline = Timeline(trainer.stages.schedule, tuple(event for stage in events for event in stage))
        return cls(trainer.step, ranks, timeline, expected)

    def table(self) -> str:
        """Return lines for the log: mean and worst rank of each category, and the forecast."""
        worst = self._worst()
        rows = {"mean": self._mean("parts"), "worst": {part: seconds for part, (_, seconds) in worst.items()}}
        if self.expected is not None:
            rows["expected"] = self.expected
        hidden: dict[str, float] = {}
        for axis, seconds in self._mean("hidden").items():
            hidden[TERM_OF.get(axis, axis)] = hidden.get(TERM_OF.get(axis, axis), 0.0) + seconds
        rows["hidden"] = hidden
        lines = [f"{'profiled':<12} step {self.step} on {len(self.ranks)} ranks, in seconds"]
        lines.append(" " * 12 + "".join(f"{part:>10}" for part in (*PARTS, "sum")))
        for name, row in rows.items():
            cells = [f"{row[part]:>10.4f}" if part in row else f"{'-':>10}" for part in PARTS]
            total = f"{sum(row.values()):>10.4f}" if name in ("mean", "expected") else ""
            lines.append(f"{name:<12}" + "".join(cells) + total)
            if name == "worst":
                lines.append(f"{'  is rank':<12}" + "".join(f"{worst[part][0]:>10}" for part in PARTS))
        return "\n".join(lines)

    def bars(self) -> dict[str, dict[str, float]]:
        """Return the bars of the picture: categories of the forecast, the mean, and the first ranks."""
        rows = {"mean": self._mean("parts"), **{f"rank {n}": one.parts for n, one in enumerate(self.ranks[:TRACED])}}
        return rows if self.expected is None else {"expected": self.expected, **rows}

    def as_dict(self) -> dict[str, Any]:
        """Return the profile for summary.json."""
        mean = self._mean("parts")
        return {
            "step": self.step,
            "step_time_s": sum(mean.values()),
            "terms_s": mean,
            "worst": {part: {"rank": rank, "seconds": seconds} for part, (rank, seconds) in self._worst().items()},
            "exposed_s": self._mean("exposed"),
            "hidden_s": self._mean("hidden"),
            "ranks": [rank.parts for rank in self.ranks],
        }

    def _worst(self) -> dict[str, tuple[int, float]]:
        """Return the slowest rank by category, with its seconds."""
        return {part: max(enumerate(one.parts[part] for one in self.ranks), key=itemgetter(1)) for part in PARTS}

    def _mean(self, field: str) -> dict[str, float]:
        values: list[dict[str, float]] = [getattr(rank, field) for rank in self.ranks]
        names = dict.fromkeys(name for rank_times in values for name in rank_times)
        return {name: fmean(rank_times.get(name, 0.0) for rank_times in values) for name in names}

    def write_trace(self, path: Path) -> None:
        """Write a trace for ui.perfetto.dev and chrome://tracing (Chrome's Trace Event Format). Raises UserError.

        Each rank is a process, with a track of its spans (X) and one of each axis's collectives (b and e: begin and
        end), which overlap.
        """
        records = [record for rank, one in enumerate(self.ranks) for record in _records(rank, one.recording)]
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}).encode())


def _records(rank: int, recording: Recording | None) -> Iterator[dict[str, Any]]:
    if recording is None:
        return
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    until: dict[tuple[str, int], float] = {}
    for span in recording.spans:
        name, args, what = str(span.what), {}, span.what
        if isinstance(what, Action):
            args = {"chunk": what.chunk, "micro": what.micro, "peer": what.peer}
            name = str(what.kind) if what.micro is None else f"{what.kind} {what.micro}"
        if span.message is not None:
            until[span.what, span.message] = span.stop
        if axis_of(span) is not None:
            name = f"wait: {name}"
        times = {"ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
        yield {"name": name, "cat": name.split()[0], "ph": "X", "pid": rank, "tid": 0, **times, "args": args}
    for axis, messages in recording.messages.items():
        for number, (came, ended) in enumerate(messages):
            record = {"name": axis, "cat": axis, "pid": rank, "tid": 0, "id": f"{rank}-{axis}-{number}"}
            yield {**record, "ph": "b", "ts": came * 1e6}
            yield {**record, "ph": "e", "ts": max(came, min(ended, until.get((axis, number), came))) * 1e6}


def durations_of(timeline: Timeline) -> Durations:
    """Return the mean times of the chunks' actions in a measured step, for the simulator."""
    times: dict[tuple[Kind, int], list[float]] = {}
    for event in timeline.events:
        times.setdefault((event.action.kind, event.action.chunk), []).append(event.stop - event.start)
    chunks = range(len(timeline.schedule.stage_of))

    def mean(*kinds: Kind) -> list[float]:
        return [sum(fmean(times[kind, chunk]) for kind in kinds if (kind, chunk) in times) for chunk in chunks]

    # a whole backward is entered as one for the input: the simulator adds the two
    return Durations(mean(Kind.FORWARD), mean(Kind.BACKWARD, Kind.BACKWARD_INPUT), mean(Kind.BACKWARD_WEIGHT))
