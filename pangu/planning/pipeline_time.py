"""How long the micro-batches of a step take under a pipeline schedule, for thousands of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pangu.pipeline.actions import Kind
from pangu.pipeline.check import source_of
from pangu.pipeline.orders import SCHEDULES, Order, Step


class Chunk(NamedTuple):
    """Seconds of a chunk of layers for one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float
    tensor: float = 0.0
    """Of all three what is communication inside layers."""
    replicas: float = 0.0
    """Of all three what is communication with replicas."""
    expert: float = 0.0
    """Of all three what is waiting for tokens on their way to experts and back."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


class Pipeline(NamedTuple):
    """A schedule in numbers."""

    schedule: str
    stages: int
    virtual: int
    micro_batches: int

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of each chunk, in model order."""
        return _stage_of(SCHEDULES[self.schedule].v_shape, self.stages, self.virtual)


@lru_cache(maxsize=1000)
def _stage_of(v_shape: bool, stages: int, virtual: int) -> tuple[int, ...]:
    down = tuple(range(stages))
    return down + down[::-1] if v_shape else down * virtual


def pipeline_seconds(pipeline: Pipeline, chunks: Sequence[Chunk], link: float) -> tuple[float, int]:
    """From the first computation of a step to the last, and the stage that computes longest.

    1F1B, GPipe and, in whole rounds of micro-batches, interleaved schedules in closed form; others are carried out.
    `link` are the seconds of a message for which a stage waits.
    """
    p, v, m = pipeline.stages, pipeline.virtual, pipeline.micro_batches
    stages = [0.0] * p
    for stage, chunk in zip(pipeline.stage_of, chunks, strict=True):
        stages[stage] += chunk.total
    longest = max(range(p), key=stages.__getitem__)
    waiting = 2 * link * v if p > 1 else 0.0
    if pipeline.schedule in ("1f1b", "gpipe") or p == 1:
        return sum(stages) + (m - 1) * (stages[longest] + waiting) + 2 * (p - 1) * link, longest
    if pipeline.schedule == "interleaved" and m % p == 0:
        first = sum(stages) / v
        return first + (m - 1 / v) * stages[longest] + (m - 1) * waiting + 2 * (p - 1) * link, longest
    most = min(m, max(4 * p, 8))  # from then on each takes as long as the longest stage computes
    durations = tuple(chunk[:3] for chunk in chunks)
    return (
        makespan(pipeline._replace(micro_batches=most), durations, link)
        + (m - most) * stages[longest]
        + m * waiting / max(1, v),
        longest,
    )


@lru_cache(maxsize=10_000)
def makespan(pipeline: Pipeline, chunks: tuple[tuple[float, float, float], ...], link: float) -> float:
    """What `pangu.pipeline.simulate` finds, without its events: from the first computation to the last, for the seconds
    of each chunk's forward, backward for the input and backward for the weights. Layouts that differ in their states
    only have the same."""
    forward, back, weight = zip(*chunks, strict=True)
    seconds = [*forward, *map(sum, zip(back, weight, strict=True)), *back, *weight]
    stops: list[float] = []
    clocks, before = [0.0] * pipeline.stages, [0.0] * pipeline.stages
    for stage, slot, source in _dependencies(pipeline):
        start = clock = clocks[stage]
        if source >= 0:  # the receive is posted when the step before the last ends, see `schedule.make_schedule`
            sent, posted = stops[source], before[stage]
            arrival = (sent if sent > posted else posted) + link
            if arrival > clock:
                start = arrival
        stop = start + seconds[slot]
        before[stage], clocks[stage] = clock, stop
        stops.append(stop)
    return max(stops)


KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@lru_cache(maxsize=100)
def _dependencies(pipeline: Pipeline) -> list[tuple[int, int, int]]:
    """All steps of all stages in a possible order: stage, place in the list of seconds by kind and chunk, and which of
    the steps sends the input (-1: none does)."""
    stage_orders, chunks = orders(pipeline), pipeline.stages * pipeline.virtual
    slots = {(kind, chunk): place * chunks + chunk for place, kind in enumerate(KINDS) for chunk in range(chunks)}
    numbers: dict[Step, int] = {}
    waiting: dict[Step, int] = {}
    steps: list[tuple[int, int, int]] = []
    rest = [zip(order, _sources(order, pipeline), strict=True) for order in stage_orders]
    taken: list[tuple[Step, Step | None] | None] = [next(pairs) for pairs in rest]
    ready = list(range(pipeline.stages))
    while ready:
        stage = ready.pop()
        while (pair := taken[stage]) is not None:
            step, source = pair
            if source is not None and source not in numbers:
                waiting[source] = stage
                break
            numbers[step] = len(steps)
            steps.append((stage, slots[step[0], step[1]], -1 if source is None else numbers[source]))
            if step in waiting:
                ready.append(waiting.pop(step))
            taken[stage] = next(rest[stage], None)
    return steps


def _sources(order: Order, pipeline: Pipeline) -> Iterator[Step | None]:
    """Of each step of a stage the step of another stage whose output it needs."""
    stage_of = pipeline.stage_of
    for kind, chunk, micro in order:
        source = source_of(kind, chunk, stage_of)
        yield None if source is None else (kind, source, micro)


@lru_cache(maxsize=100)
def orders(pipeline: Pipeline) -> list[Order]:
    """What each stage computes, in its order."""
    return SCHEDULES[pipeline.schedule].order(*pipeline[1:])
