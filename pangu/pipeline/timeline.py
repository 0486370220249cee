"""When every stage did what in one step, simulated or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pangu.pipeline.actions import COMPUTE, Action, Kind
from pangu.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Durations:
    """Seconds (or any one unit) per action; a sequence has one entry per chunk in model order."""

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    """A BACKWARD takes backward_input + backward_weight."""
    link: float = 0.0
    """A message's time from when it is sent and its receive posted until it can be used. Messages do not slow each
    other down; gathers and reductions of parameters take no time."""

    def per_chunk(self, num_chunks: int) -> dict[Kind, list[float]]:
        """Duration of each kind of compute action, by chunk. Raises ValueError for a sequence of another length."""

        def spread(name: str, value: float | Sequence[float]) -> list[float]:
            values = list(value) if isinstance(value, Sequence) else [value] * num_chunks
            if len(values) != num_chunks:
                raise ValueError(f"{name} has {len(values)} entries: needs one per chunk, {num_chunks}")
            return values

        forward = spread("forward", self.forward)
        to_input = spread("backward_input", self.backward_input)
        to_weight = spread("backward_weight", self.backward_weight)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: [a + b for a, b in zip(to_input, to_weight, strict=True)],
            Kind.BACKWARD_INPUT: to_input,
            Kind.BACKWARD_WEIGHT: to_weight,
        }


class Event(NamedTuple):
    """An action and its time; a send's is that of its transfer."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    schedule: Schedule
    events: tuple[Event, ...]
    """In any order. Simulated: compute actions and sends."""

    @cached_property
    def computing(self) -> tuple[tuple[Event, ...], ...]:
        stages: list[list[Event]] = [[] for _ in range(self.schedule.stages)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                stages[event.stage].append(event)
        return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in stages)

    @cached_property
    def start(self) -> float:
        return min(events[0].start for events in self.computing)

    @cached_property
    def makespan(self) -> float:
        """From the first computation of any stage to the last."""
        return max(events[-1].stop for events in self.computing) - self.start

    @cached_property
    def stage_bubbles(self) -> tuple[float, ...]:
        """Share of the makespan in which each stage is idle."""
        return tuple(1 - sum(event.stop - event.start for event in events) / self.makespan for events in self.computing)

    @cached_property
    def bubble(self) -> float:
        """Share of all stages' time that is idle, the (p-1)/(m+p-1) form, not idle over busy, (p-1)/m."""
        return sum(self.stage_bubbles) / len(self.stage_bubbles)

    def peak_live(self, kept_for_weight: float = 1.0) -> tuple[float, ...]:
        """Most activations at once on each stage, in activations of one chunk for one micro-batch. One lives from the
        start of its forward to the end of its backward. Where the backward is split, the share `kept_for_weight` of it
        (with the gradient of the output) stays until the end of BACKWARD_WEIGHT: the M_W / M_B of arXiv 2401.10241,
        2.1. With 0, counted from F to I alone, ZB-H1 has as many as 1F1B, p - r."""
        released = {Kind.FORWARD: -1.0, Kind.BACKWARD: 1.0, Kind.BACKWARD_INPUT: 1.0 - kept_for_weight}
        peaks = []
        for events in self.computing:
            live = peak = 0.0
            for event in events:
                live -= released.get(event.action.kind, kept_for_weight)
                peak = max(peak, live)
            peaks.append(peak)
        return tuple(peaks)
