"""Simulation of a schedule: the time of each stage's actions, given their durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pangu.schedule.actions import COMPUTE, MESSAGES, Action, Durations, Kind
from pangu.schedule.check import Message, ScheduleError, check, input_of, message_of, source_of
from pangu.schedule.schedule import Schedule, make_schedule
from pangu.schedule.timeline import Event, Timeline


class Gap(NamedTuple):
    """Interval in which a stage does not compute."""

    stage: int
    start: float
    stop: float
    then: Action | None
    """Forward or backward pass that ends the gap; None: the stage has no work left."""
    awaited: Message | None
    """Message that the stage waits for."""


def gaps(timeline: Timeline, measured: bool) -> tuple[Gap, ...]:
    """Return the gaps of all stages between the first and last computation of any stage."""
    # A stage waits for a message from the end of its last action on; messages and parameter actions count as actions
    # only if the times are `measured`, and otherwise take no time.
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


# These are the previous one on its stage, the one after which its input is sent (0: no message), and the one after
# which its stage posts the receive. Offsets count back in the list of all computations: -1 is the one before.
Computation = tuple[int, int, int, int]
"""Computation of any stage: index of its duration (`_seconds`), and offsets of three computations it depends on."""


@lru_cache(maxsize=100)
def _computations(schedule: Schedule) -> tuple[list[Action], list[Computation]]:
    """Return the computations of all stages in a valid order; raise `ScheduleError` if there is none."""
    # Stages take turns, and pass while the message that they need is not sent yet, so the list repeats where the
    # schedule does.
    stage_of, chunks = schedule.stage_of, len(schedule.stage_of)
    slots = {kind: place * chunks for place, kind in enumerate(sorted(COMPUTE))}
    computations: list[Action] = []
    steps: list[Computation] = []
    lasts, nexts = [0] * schedule.stages, [0] * schedule.stages
    ends = list(map(len, schedule.actions))
    posted: dict[Message, int] = {}
    sent: dict[Message, int] = {}
    while nexts != ends:
        begun = nexts.copy()
        for stage, actions in enumerate(schedule.actions):
            last, number = lasts[stage], len(steps) + 1
            for index in range(nexts[stage], ends[stage]):
                action = actions[index]
                kind = action.kind
                if kind in slots:
                    message = input_of(action, stage_of)
                    if last == number or (message is not None and message not in sent):
                        break
                    awaited = (0, 0) if message is None else (sent[message] - number, posted[message] - number)
                    computations.append(action)
                    steps.append((slots[kind] + action.chunk, last - number, *awaited))
                    last = number
                elif kind in MESSAGES:
                    message = message_of(action)
                    (posted if message[0] is kind else sent)[message] = last
                nexts[stage] = index + 1
            lasts[stage] = last
        if nexts == begun:
            raise ScheduleError(_deadlock(schedule, nexts))
    return computations, steps


def _seconds(schedule: Schedule, durations: Durations) -> list[float]:
    by_kind = durations.per_chunk(len(schedule.stage_of))
    return [seconds for kind in sorted(COMPUTE) for seconds in by_kind[kind]]


def _run(steps: Iterable[Computation], stops: list[float], seconds: Sequence[float], link: float) -> None:
    """Append the stop time of each computation, which starts when its stage is free and its input has arrived."""
    # A transfer starts when the message is sent and its receive is posted.
    for slot, before, sent, posted in steps:
        start = stops[before]
        if sent:
            arrival = stops[sent]
            if (ready := stops[posted]) > arrival:
                arrival = ready
            arrival += link
            if arrival > start:
                start = arrival
        stops.append(start + seconds[slot])


def makespan(schedule: Schedule, durations: Durations, more: int = 0) -> float:
    """Return the time from the first computation of a step to the last, as `simulate` finds it.

    Args:
        schedule: Valid schedule, see `check`.
        durations: Durations as in `simulate`.
        more: Number of additional micro-batches in the same kind of schedule. If it repeats itself, they are neither
            constructed nor, once all stages keep the same pace, simulated.
    """
    steps, seconds, stops = _computations(schedule)[1], _seconds(schedule, durations), [0.0]
    place, length = _round(schedule) if more else (0, 0)
    if more and (not length or more % schedule.stages):
        steps, more = _longer(schedule, more), 0
    _run(steps[: place + length], stops, seconds, durations.link)
    skipped = 0.0
    for rounds in range(more // schedule.stages, 0, -1):
        _run(steps[place : place + length], stops, seconds, durations.link)
        added = [after - before for after, before in zip(stops[-length:], stops[-2 * length : -length], strict=True)]
        if rounds > 1 and max(added) - min(added) <= STEADY * max(added):
            skipped = (rounds - 1) * added[-1]
            break
    _run(steps[place + length :], stops, seconds, durations.link)
    return max(stops) + skipped


class ChunkTimes(NamedTuple):
    """Times of the first and last computation of a chunk in a step, in the unit of the durations."""

    start: float
    last: float
    """Start of the last computation."""
    stop: float


def chunk_times(schedule: Schedule, durations: Durations) -> list[list[ChunkTimes]]:
    """Return the times of the chunks of each stage, as `simulate` finds them."""
    seconds, stops, times = _seconds(schedule, durations), [0.0], [list[ChunkTimes]() for _ in range(schedule.stages)]
    _run(_computations(schedule)[1], stops, seconds, durations.link)
    for stage, ((first, slot), (last, other)) in zip(schedule.stage_of, _first_and_last(schedule), strict=True):
        times[stage].append(ChunkTimes(stops[first] - seconds[slot], stops[last] - seconds[other], stops[last]))
    return times


@lru_cache(maxsize=100)
def _first_and_last(schedule: Schedule) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the places of the first and last computation of each chunk, with their indices in `_seconds`."""
    pairs = enumerate(zip(*_computations(schedule), strict=True), 1)
    places = [(action.chunk, (place, slot)) for place, (action, (slot, *_)) in pairs]
    first, last = dict(reversed(places)), dict(places)
    return [(first[chunk], last[chunk]) for chunk in range(len(schedule.stage_of))]


STEADY = 1e-12
"""Relative difference between the durations of equal rounds that counts as rounding."""


@lru_cache(maxsize=100)
def _round(schedule: Schedule) -> tuple[int, int]:
    """Return offset and length, in computations, of a round that a schedule repeats; (0, 0): none."""
    # A round has as many micro-batches as there are stages.
    steps = _computations(schedule)[1]
    length, rest = divmod(len(steps) * schedule.stages, schedule.micro_batches)
    same = 0
    for place, (step, later) in enumerate(zip(steps, steps[length:], strict=False), 1 - length):
        same = same + 1 if step == later else 0
        if same == length and not rest:
            counts = Counter(slot for slot, *_ in steps[place : place + length])
            whole = len(counts) == len({slot for slot, *_ in steps}) and set(counts.values()) == {schedule.stages}
            near = all(min(awaited) >= -length for _, *awaited in steps[place : place + length])
            return (place, length) if whole and near else (0, 0)
    return 0, 0


@lru_cache(maxsize=100)
def _longer(schedule: Schedule, more: int) -> list[Computation]:
    numbers = schedule.stages, schedule.virtual_stages, schedule.micro_batches + more
    return _computations(make_schedule(schedule.name, *numbers, schedule.reduce_each))[1]


def simulate(schedule: Schedule, durations: Durations, checked: bool = False) -> Timeline:
    """Run all action lists from time 0, each action as soon as its inputs have arrived.

    Raise `ScheduleError` if the lists are inconsistent (unless already `checked`, see `check`) or stages wait for each
    other in a circle, `ValueError` if the durations are not for this number of chunks.
    """
    if not checked:
        check(schedule)
    computations, steps = _computations(schedule)
    stage_of, link, stops = schedule.stage_of, durations.link, [0.0]
    _run(steps, stops, _seconds(schedule, durations), link)
    events: list[Event] = []
    for number, (action, (_, before, sent, posted)) in enumerate(zip(computations, steps, strict=True), 1):
        stage, start = stage_of[action.chunk], stops[number + before]
        if (source := source_of(action.kind, action.chunk, stage_of)) is not None:
            send = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
            begin = max(stops[number + sent], stops[number + posted])
            start = max(start, begin + link)
            events.append(Event(stage_of[source], Action(send, source, action.micro, stage), begin, begin + link))
        events.append(Event(stage, action, start, stops[number]))
    return Timeline(schedule, tuple(events))


def _deadlock(schedule: Schedule, nexts: list[int]) -> str:
    lines = []
    for stage, index in enumerate(nexts):
        if index < len(schedule.actions[stage]):
            action = schedule.actions[stage][index]
            message = input_of(action, schedule.stage_of)
            assert message is not None
            source = source_of(action.kind, action.chunk, schedule.stage_of)
            assert source is not None
            lines.append(f"stage {stage}: {action}: waits for {message[0]} from stage {schedule.stage_of[source]}")
    return "deadlock: stages wait for each other: " + "; ".join(lines)


def bubble_by_formula(name: str, stages: int, virtual_stages: int, micro_batches: int) -> float | None:
    """Return the bubble of a step, idle / (idle + busy), by formula, or None if there is none.

    Forwards and both parts of backwards take the same time in all chunks, and messages none. With m >= p:

    - gpipe, 1f1b: (p-1) / (m+p-1) (arXiv 2104.04473, 2.2, which gives idle / busy, (p-1)/m)
    - interleaved, breadth_first: (p-1) / (v m + p-1) (the same; arXiv 2211.05953)
    - zb_h1, zb_v: idle as long as p-1 forwards (arXiv 2401.10241, table 2)

    With m < p each round over the chunks (gpipe to breadth_first) takes p, not m; the zero-bubble schedules are as long
    as the path of the first micro-batch, and the others behind it, allows.
    """
    p, v, m = stages, virtual_stages, micro_batches
    if name in ("gpipe", "1f1b", "interleaved", "breadth_first"):
        makespan = ((v - 1) * max(m, p) + m + p - 1) * 3
    elif name == "zb_h1":
        makespan = (p + m - 1) * 2 + max(1, m - p + 1)
    elif name == "zb_v":
        makespan = max(4 * p - 1 + 2 * m, 3 * p - 1 + 4 * m, p - 1 + 6 * m)
    else:
        return None
    return 1 - m * v * 3 / makespan
