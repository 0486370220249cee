"""Simulates a schedule: when each stage does what, given how long each action takes."""

from __future__ import annotations

from typing import NamedTuple

from pangu.pipeline.actions import COMPUTE, MESSAGES, Action, Durations
from pangu.pipeline.check import Message, ScheduleError, check, input_of, message_of, source_of
from pangu.pipeline.schedule import Schedule
from pangu.pipeline.timeline import Event, Timeline


class Gap(NamedTuple):
    stage: int
    start: float
    stop: float
    then: Action | None
    """The forward or backward that ends it; None: the stage has no work left."""
    awaited: Message | None
    """The message that it waits for."""


def gaps(timeline: Timeline, measured: bool) -> tuple[Gap, ...]:
    """The gaps of all stages between the first computation of any stage and the last. A stage waits for a message from
    the end of its last action on; posting messages and parameter actions count as such if the times are `measured`, and
    otherwise take no time."""
    stage_gaps: list[Gap] = []
    end = timeline.start + timeline.makespan
    for stage in range(timeline.schedule.stages):
        events = [e for e in timeline.events if e.stage == stage] if measured else timeline.computing[stage]
        computed = free = timeline.start
        for event in sorted(events, key=lambda event: event.start):
            if event.action.kind in COMPUTE:
                awaited = input_of(event.action, timeline.schedule.stage_of)
                waits = event.start if awaited is None else min(max(computed, free), event.start)
                stage_gaps.append(Gap(stage, computed, waits, event.action, None))
                stage_gaps.append(Gap(stage, waits, event.start, event.action, awaited))
                computed = event.stop
            free = event.stop
        stage_gaps.append(Gap(stage, computed, end, None, None))
    return tuple(gap for gap in stage_gaps if gap.stop > gap.start)


def simulate(schedule: Schedule, durations: Durations, checked: bool = False) -> Timeline:
    """Run all action lists from time 0 on, each action as soon as its inputs are there; a message's transfer begins
    when it is sent and its receive is posted. Raises ScheduleError if the lists do not fit (see check; not if they are
    `checked` already) or stages wait for each other in a circle, ValueError if the durations are not for this many
    chunks."""
    # A plan simulates thousands of schedules, so no queue of events is sorted: a stage runs on until it needs a message
    # that is not sent yet, and the send takes it up again. Every action is looked at once or twice.
    #
    #     stage 0   F0, sends | F1, sends | waits for the gradient of 0   | B0 ...
    #     stage 1                           F0, B0, sends                   F1 ...
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
    """What every unfinished stage is waiting for."""
    lines = []
    for stage, index in enumerate(nexts):
        if index < len(schedule.actions[stage]):
            action = schedule.actions[stage][index]
            message = input_of(action, schedule.stage_of)
            assert message is not None
            source = source_of(action.kind, action.chunk, schedule.stage_of)
            assert source is not None
            lines.append(f"stage {stage}: {action}: waits for {message[0]} from stage {schedule.stage_of[source]}")
    return "stages wait for each other in a circle: " + "; ".join(lines)


def bubble_by_formula(
    name: str,
    stages: int,
    virtual: int,
    micro_batches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """Bubble of a step, idle / (idle + busy), by formula; None where there is none for these numbers.

    The times are those of one chunk and one micro-batch, the same for all chunks; messages take no time. With m >= p:

    - gpipe, 1f1b: (p-1) / (m+p-1) (arXiv 2104.04473, 2.2, which gives idle / busy, (p-1)/m)
    - interleaved, breadth_first: (p-1) / (v m + p-1) (the same; arXiv 2211.05953)
    - zb_h1: idle (p-1)(F + I - W) (arXiv 2401.10241, table 2), if W <= F and W <= I
    - zb_v: idle (p-1) F, if F = I = W

    With m < p each round over the chunks (gpipe to breadth_first) takes p, not m; the zero-bubble schedules are as long
    as the path of the first micro-batch, and the others behind it, allows.
    """
    p, v, m = stages, virtual, micro_batches
    whole = forward + backward_input + backward_weight
    if name in ("gpipe", "1f1b", "interleaved", "breadth_first"):
        makespan = ((v - 1) * max(m, p) + m + p - 1) * whole
    elif name == "zb_h1" and backward_weight <= min(forward, backward_input):
        makespan = (p + m - 1) * (forward + backward_input) + max(1, m - p + 1) * backward_weight
    elif name == "zb_v" and forward == backward_input == backward_weight:
        makespan = max(4 * p - 1 + 2 * m, 3 * p - 1 + 4 * m, p - 1 + 6 * m) * forward
    else:
        return None
    return 1 - m * v * whole / makespan
