"""Carries out a schedule on paper: when each stage does what, given how long each action takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pangu.pipeline.actions import COMPUTE, MESSAGES, Action, Kind
from pangu.pipeline.check import Message, ScheduleError, check, input_of, message_of
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
    """An action that took place. A send's time is that of its message's transfer."""

    stage: int
    action: Action
    start: float
    stop: float


class Gap(NamedTuple):
    """A time in which a stage does not compute."""

    stage: int
    start: float
    stop: float
    then: Action | None
    """The forward or backward that ends it; None: the stage has no work left."""
    awaited: Message | None
    """What that waits for."""


@dataclass(frozen=True)
class Timeline:
    """When every stage did what in one step, simulated or measured."""

    schedule: Schedule
    events: tuple[Event, ...]
    """In any order. Simulated: compute actions and sends."""

    @cached_property
    def computing(self) -> tuple[tuple[Event, ...], ...]:
        """The forwards and backwards of each stage, in order of time."""
        stages: list[list[Event]] = [[] for _ in range(self.schedule.stages)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                stages[event.stage].append(event)
        return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in stages)

    @cached_property
    def start(self) -> float:
        """When the first stage began to compute."""
        return min(events[0].start for events in self.computing)

    @cached_property
    def makespan(self) -> float:
        """From the first computation of any stage to the last."""
        return max(events[-1].stop for events in self.computing) - self.start

    @cached_property
    def stage_bubbles(self) -> tuple[float, ...]:
        """Share of the makespan that each stage does not compute: idle / makespan."""
        return tuple(1 - sum(event.stop - event.start for event in events) / self.makespan for events in self.computing)

    @cached_property
    def bubble(self) -> float:
        """Share of all stages' time that is idle, the (p-1)/(m+p-1) form, not idle over busy, (p-1)/m."""
        return sum(self.stage_bubbles) / len(self.stage_bubbles)

    def gaps(self, measured: bool) -> tuple[Gap, ...]:
        """What the stages do instead of computing, between the first computation of any stage and the last.

        Where a computation needs a message, the stage waits for it from when all that it did before is done. Of what
        was `measured` that is also what posts messages and what concerns parameters; otherwise it takes no time.
        """
        found: list[Gap] = []
        end = self.start + self.makespan
        for stage in range(self.schedule.stages):
            own = [e for e in self.events if e.stage == stage] if measured else self.computing[stage]
            computed = free = self.start
            for event in sorted(own, key=lambda event: event.start):
                if event.action.kind in COMPUTE:
                    awaited = input_of(event.action, self.schedule.stage_of)
                    waits = event.start if awaited is None else min(max(computed, free), event.start)
                    found.append(Gap(stage, computed, waits, event.action, None))
                    found.append(Gap(stage, waits, event.start, event.action, awaited))
                    computed = event.stop
                free = event.stop
            found.append(Gap(stage, computed, end, None, None))
        return tuple(gap for gap in found if gap.stop > gap.start)

    def peak_live(self, kept_for_weight: float = 1.0) -> tuple[float, ...]:
        """Most activations held at once by each stage, in activations of one chunk for one micro-batch.

        One is held from the start of its forward to the end of its backward. Where the backward is split, the share
        `kept_for_weight` of it (with the gradient of the output) stays until the end of BACKWARD_WEIGHT: the M_W / M_B
        of arXiv 2401.10241, 2.1. With 0, counted from F to I alone, ZB-H1 holds what 1F1B holds, p - r.
        """
        released = {Kind.FORWARD: -1.0, Kind.BACKWARD: 1.0, Kind.BACKWARD_INPUT: 1.0 - kept_for_weight}
        peaks = []
        for events in self.computing:
            live = peak = 0.0
            for event in events:
                live -= released.get(event.action.kind, kept_for_weight)
                peak = max(peak, live)
            peaks.append(peak)
        return tuple(peaks)


def simulate(schedule: Schedule, durations: Durations, checked: bool = False) -> Timeline:
    """Carry out all action lists from time 0 on, each action as soon as what it needs is there.

    A message's transfer begins when it is sent and its receive is posted. Raises ScheduleError if the lists do not fit
    (see check; not if they are `checked` already) or stages wait for each other in a circle, ValueError if the
    durations are not for this many chunks.
    """
    if not checked:
        check(schedule)
    seconds = durations.per_chunk(len(schedule.stage_of))
    clocks = [0.0] * schedule.stages
    nexts = [0] * schedule.stages
    posted: dict[Message, float] = {}
    sent: dict[Message, Event] = {}
    waiting: dict[Message, int] = {}
    events: list[Event] = []
    ready = list(range(schedule.stages))
    while ready:
        stage = ready.pop()
        actions, clock = schedule.actions[stage], clocks[stage]
        index = nexts[stage]
        while index < len(actions):
            action = actions[index]
            kind = action.kind
            if kind in COMPUTE:
                message = input_of(action, schedule.stage_of)
                if message is not None:
                    if message not in sent:
                        waiting[message] = stage
                        break
                    send = sent[message]
                    begin = max(send.start, posted[message])
                    events.append(Event(send.stage, send.action, begin, begin + durations.link))
                    clock = max(clock, begin + durations.link)
                stop = clock + seconds[kind][action.chunk]
                events.append(Event(stage, action, clock, stop))
                clock = stop
            elif kind in MESSAGES:
                message = message_of(action)
                if message[0] is kind:
                    posted[message] = clock
                else:
                    sent[message] = Event(stage, action, clock, clock)
                    if message in waiting:
                        ready.append(waiting.pop(message))
            index += 1
        nexts[stage], clocks[stage] = index, clock
    if waiting:
        raise ScheduleError(_deadlock(schedule, nexts))
    return Timeline(schedule, tuple(events))


def _deadlock(schedule: Schedule, nexts: list[int]) -> str:
    """What every stage that has not come to its end is waiting for."""
    lines = []
    for stage, index in enumerate(nexts):
        if index < len(schedule.actions[stage]):
            action = schedule.actions[stage][index]
            message = input_of(action, schedule.stage_of)
            assert message is not None
            before = action.chunk - 1 if action.kind is Kind.FORWARD else action.chunk + 1
            lines.append(f"stage {stage}: {action}: waits for {message[0]} from stage {schedule.stage_of[before]}")
    return "stages wait for each other in a circle: " + "; ".join(lines)
