"""Advice about the pipeline schedule, which a run logs at startup."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from pangu.metrics.text import quantity
from pangu.schedule.actions import Durations, Kind
from pangu.schedule.check import check
from pangu.schedule.orders import SCHEDULES, NumbersError
from pangu.schedule.schedule import Schedule, make_schedule
from pangu.schedule.simulate import makespan

GOOD_BUBBLE = 0.1
"""Fraction of idle time below which no advice is given."""
MOST_COMPARED = 4096
"""Maximum forwards of a step, over all chunks, for which other schedules are simulated: more would take seconds."""
WORTH_CHANGING = 0.03
"""Minimum fraction of the compute time of a step that a suggested change saves."""


class _Cost(NamedTuple):
    """Schedule with its simulated step time, bubble and activations."""

    schedule: Schedule
    makespan: float
    bubble: float
    held: float
    """Largest number of activations on any stage, in micro-batches."""


def _cost(schedule: Schedule, durations: Durations) -> _Cost:
    total, seconds = makespan(schedule, durations), durations.per_chunk(len(schedule.stage_of))
    busy = schedule.micro_batches * (sum(seconds[Kind.FORWARD]) + sum(seconds[Kind.BACKWARD]))
    bubble, held = max(0.0, 1 - busy / (schedule.stages * total)), max(schedule.peak_live()) / schedule.virtual_stages
    return _Cost(schedule, total, bubble, held)


def advise(schedule: Schedule, durations: Durations, num_layers: int, micro_size: int) -> list[str]:
    """Return log lines with the bubble and activations of a schedule, and warnings where another would pay off.

    All numbers are simulated; errors are those of `simulate`. Schedules that need more than `num_layers` chunks are not
    suggested; `micro_size` is the number of sequences of a micro-batch.
    """
    check(schedule)
    now = _cost(schedule, durations)
    lines = [f"{'pipeline':<12} {_described(now)}"]
    if now.bubble > GOOD_BUBBLE:
        more = _more_micro_batches(now, durations)
        # more micro-batches do not help if the stages are uneven
        if more is not None and more.bubble <= now.bubble - WORTH_CHANGING:
            smaller = "smaller batch.micro_size or " if micro_size > 1 else ""
            lines.append(
                f"warning: the pipeline is idle {now.bubble:.1%} of the time; {more.schedule.micro_batches} "
                f"micro-batches would make it {more.bubble:.1%}: use a {smaller}larger batch.global_size"
            )
    for other in _better_schedules(now, durations, num_layers):
        chunks = other.schedule.virtual_stages
        split = f" parallel.virtual_stages={chunks}" if chunks != schedule.virtual_stages else ""
        faster = now.makespan / other.makespan - 1
        lines.append(
            f"warning: parallel.schedule={other.schedule.name}{split} would be {faster:.1%} faster: {_described(other)}"
        )
    return lines


def _described(cost: _Cost) -> str:
    schedule = cost.schedule
    chunks = f" of {schedule.virtual_stages} chunks" if schedule.virtual_stages > 1 else ""
    held = [f"{live / schedule.virtual_stages:.3g}" for live in schedule.peak_live()]
    per_stage = f"{held[0]} on each stage" if len(set(held)) == 1 else f"{', '.join(held)} by stage"
    return (
        f"{schedule.name}, {schedule.stages} stages{chunks}, {quantity(schedule.micro_batches, 'micro-batch')}: "
        f"bubble {cost.bubble:.1%}, peak activations in micro-batches: {per_stage}"
    )


def _made(name: str, stages: int, virtual_stages: int, micro_batches: int) -> Schedule | None:
    """Return a schedule, or None if it does not allow these numbers."""
    try:
        return make_schedule(name, stages, virtual_stages, micro_batches)
    except NumbersError:
        return None


def _more_micro_batches(now: _Cost, durations: Durations) -> _Cost | None:
    """Return the schedule with enough micro-batches for a good bubble; None if too many, or not allowed."""
    # With at least as many micro-batches as stages, further ones (in multiples of the stages) add work but no idle
    # time, unless stages are uneven or links slow.
    schedule = now.schedule
    if schedule.stages * len(schedule.stage_of) > MOST_COMPARED:
        return None
    if schedule.micro_batches < schedule.stages:
        enough = _made(schedule.name, schedule.stages, schedule.virtual_stages, schedule.stages)
        if enough is None:
            return None
        now = _cost(enough, durations)
    per_bubble = now.schedule.micro_batches * now.bubble / (1 - now.bubble)
    rounds = math.ceil(per_bubble * (1 - GOOD_BUBBLE) / GOOD_BUBBLE / schedule.stages - 1e-9)
    micro_batches = max(1, rounds) * schedule.stages
    if micro_batches * len(schedule.stage_of) > MOST_COMPARED:
        return None
    more = _made(schedule.name, schedule.stages, schedule.virtual_stages, micro_batches)
    return None if more is None else _cost(more, durations)


def _better_schedules(now: _Cost, durations: Durations, num_layers: int) -> list[_Cost]:
    """Return other schedules that pay off: the fastest, the fastest without more activations, and a leaner one."""
    # The first two must save WORTH_CHANGING; the third halves the activations at least, and is not slower.
    others = [_cost(*other) for other in _others(now.schedule, durations, num_layers)]
    others.sort(key=lambda other: (other.makespan, other.held))
    faster = [other for other in others if other.makespan <= (1 - WORTH_CHANGING) * now.makespan]
    frugal = [other for other in faster if other.held <= now.held]
    lean = [other for other in others if other.makespan <= now.makespan and 2 * other.held <= now.held]
    lean.sort(key=lambda other: other.held)
    named = {other.schedule.name: other for other in faster[:1] + frugal[:1] + lean[:1]}
    return list(named.values())


def _others(schedule: Schedule, durations: Durations, num_layers: int) -> Iterator[tuple[Schedule, Durations]]:
    """Yield the other schedules with enough layers, dividing each stage's time evenly over its chunks."""
    if schedule.micro_batches * len(schedule.stage_of) > MOST_COMPARED:
        return
    seconds = durations.per_chunk(len(schedule.stage_of))
    stage_seconds = [[0.0] * schedule.stages for _ in range(3)]
    for total, kind in zip(stage_seconds, (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), strict=True):
        for stage, time in zip(schedule.stage_of, seconds[kind], strict=True):
            total[stage] += time
    for name, family in SCHEDULES.items():
        least, most = family.virtual_stages
        virtual_stages = least if most is not None else max(2, least)
        if name == schedule.name or schedule.stages * virtual_stages > num_layers:
            continue
        if other := _made(name, schedule.stages, virtual_stages, schedule.micro_batches):
            forward, to_input, to_weight = (
                [total[stage] / virtual_stages for stage in other.stage_of] for total in stage_seconds
            )
            yield other, Durations(forward, to_input, to_weight, durations.link)
