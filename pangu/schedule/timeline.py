"""Timeline of all stages in one step, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pangu.schedule.actions import COMPUTE, Action
from pangu.schedule.schedule import Schedule


class Event(NamedTuple):
    """Action with its time; for a send, the time of its transfer."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """Events of all stages in one step."""

    schedule: Schedule
    events: tuple[Event, ...]
    """Events in any order; a simulation has compute actions and sends."""

    @cached_property
    def computing(self) -> tuple[tuple[Event, ...], ...]:
        """Compute events of each stage, in order of time."""
        stages: list[list[Event]] = [[] for _ in range(self.schedule.stages)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                stages[event.stage].append(event)
        return tuple(tuple(sorted(events, key=lambda event: event.start)) for events in stages)

    @cached_property
    def start(self) -> float:
        """Start of the first computation of any stage."""
        return min(events[0].start for events in self.computing)

    @cached_property
    def makespan(self) -> float:
        """Time from the first computation of any stage to the last."""
        return max(events[-1].stop for events in self.computing) - self.start

    @cached_property
    def stage_bubbles(self) -> tuple[float, ...]:
        """Idle fraction of the makespan, per stage."""
        return tuple(1 - sum(event.stop - event.start for event in events) / self.makespan for events in self.computing)

    @cached_property
    def bubble(self) -> float:
        """Idle fraction of all stages' time, as in (p-1)/(m+p-1), not idle over busy, (p-1)/m."""
        return sum(self.stage_bubbles) / len(self.stage_bubbles)
