"""Advice about its pipeline that a run logs at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pangu.pipeline.actions import Durations, Kind
from pangu.pipeline.orders import SCHEDULES
from pangu.pipeline.schedule import Schedule, make_schedule
from pangu.pipeline.simulate import simulate
from pangu.pipeline.timeline import Timeline

GOOD_BUBBLE = 0.1
MOST_COMPARED = 4096
"""Forwards of a step, over all chunks, up to which other schedules are simulated: more take seconds."""
WORTH_CHANGING = 0.03
"""Share of the step's computing time that a change has to save to be named."""


def advise(schedule: Schedule, durations: Durations, num_layers: int, micro_size: int) -> list[str]:
    """Lines for the log: bubble and activations of the schedule, and warnings where another would pay, all simulated.
    Schedules that need more than `num_layers` chunks are not named. `micro_size`: sequences of a micro-batch. Raises as
    `simulate`."""
    timeline = simulate(schedule, durations)
    lines = [f"{'pipeline':<12} {_described(timeline)}"]
    if timeline.bubble > GOOD_BUBBLE:
        more = _more_micro_batches(timeline, durations)
        # not where the stages are uneven
        if more is not None and more.bubble <= timeline.bubble - WORTH_CHANGING:
            smaller = "smaller batch.micro_size or " if micro_size > 1 else ""
            lines.append(
                f"warning: the pipeline is idle {timeline.bubble:.1%} of the time; {more.schedule.micro_batches} "
                f"micro-batches ({smaller}larger batch.global_size) would make it {more.bubble:.1%}"
            )
    for other in _better_schedules(timeline, durations, num_layers):
        virtual = f" parallel.virtual={other.schedule.virtual}" if other.schedule.virtual > 1 else ""
        faster = timeline.makespan / other.makespan - 1
        lines.append(
            f"warning: parallel.schedule={other.schedule.name}{virtual} would be {faster:.1%} faster: "
            f"{_described(other)}"
        )
    return lines


def _described(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = f" of {schedule.virtual} chunks" if schedule.virtual > 1 else ""
    held = [f"{live / schedule.virtual:.3g}" for live in timeline.peak_live()]
    per_stage = f"{held[0]} on each stage" if len(set(held)) == 1 else f"{', '.join(held)} by stage"
    batches = "1 micro-batch" if schedule.micro_batches == 1 else f"{schedule.micro_batches} micro-batches"
    return (
        f"{schedule.name}, {schedule.stages} stages{chunks}, {batches}: "
        f"bubble {timeline.bubble:.1%}, activations of at most so many micro-batches held: {per_stage}"
    )


def _more_micro_batches(timeline: Timeline, durations: Durations) -> Timeline | None:
    """The same schedule with as many micro-batches, a multiple of the stages, as should make the bubble good; None if
    that is too much to simulate. From as many micro-batches as stages on, more of them add work but no idle time,
    unless stages are uneven or links slow."""
    schedule = timeline.schedule
    if schedule.stages * len(schedule.stage_of) > MOST_COMPARED:
        return None
    if schedule.micro_batches < schedule.stages:
        enough = make_schedule(schedule.name, schedule.stages, schedule.virtual, schedule.stages)
        timeline = simulate(enough, durations, checked=True)
    per_bubble = timeline.schedule.micro_batches * timeline.bubble / (1 - timeline.bubble)
    rounds = math.ceil(per_bubble * (1 - GOOD_BUBBLE) / GOOD_BUBBLE / schedule.stages - 1e-9)
    micro_batches = max(1, rounds) * schedule.stages
    if micro_batches * len(schedule.stage_of) > MOST_COMPARED:
        return None
    more = make_schedule(schedule.name, schedule.stages, schedule.virtual, micro_batches)
    return simulate(more, durations, checked=True)


def _better_schedules(timeline: Timeline, durations: Durations, num_layers: int) -> list[Timeline]:
    """Of the other schedules, on the same work: the fastest; the fastest with no more activations; and the one with
    fewest, if that is half as many or less, without being slower. The first two if they save enough."""
    timelines = [simulate(*other, checked=True) for other in _others(timeline.schedule, durations, num_layers)]
    timelines.sort(key=lambda other: (other.makespan, _held(other)))
    faster = [other for other in timelines if other.makespan <= (1 - WORTH_CHANGING) * timeline.makespan]
    frugal = [other for other in faster if _held(other) <= _held(timeline)]
    lean = [other for other in timelines if other.makespan <= timeline.makespan and 2 * _held(other) <= _held(timeline)]
    named = {other.schedule.name: other for other in faster[:1] + frugal[:1] + sorted(lean, key=_held)[:1]}
    return list(named.values())


def _others(schedule: Schedule, durations: Durations, num_layers: int) -> Iterator[tuple[Schedule, Durations]]:
    """The other schedules that the layers suffice for, with a stage's time cut evenly over its chunks; none if that is
    too much to simulate."""
    if schedule.micro_batches * len(schedule.stage_of) > MOST_COMPARED:
        return
    seconds = durations.per_chunk(len(schedule.stage_of))
    stage_seconds = [[0.0] * schedule.stages for _ in range(3)]
    for total, kind in zip(stage_seconds, (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), strict=True):
        for stage, time in zip(schedule.stage_of, seconds[kind], strict=True):
            total[stage] += time
    for name, family in SCHEDULES.items():
        least, most = family.virtual
        virtual = least if most is not None else max(2, least)
        if name != schedule.name and schedule.stages * virtual <= num_layers:
            other = make_schedule(name, schedule.stages, virtual, schedule.micro_batches)
            forward, to_input, to_weight = (
                [total[stage] / virtual for stage in other.stage_of] for total in stage_seconds
            )
            yield other, Durations(forward, to_input, to_weight, durations.link)


def _held(timeline: Timeline) -> float:
    """Largest number of activations on any stage, in micro-batches."""
    return max(timeline.peak_live()) / timeline.schedule.virtual
