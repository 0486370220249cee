"""Chunks and schedule of the pipeline stages, from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace
from operator import le, mul

from pangu.common.errors import ConfigError, Problem
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart
from pangu.models.size import head_flops, layer_flops
from pangu.pipeline.balance import split_layers
from pangu.schedule.actions import Durations
from pangu.schedule.orders import OVERLAPPED, SCHEDULES, NumbersError, allows
from pangu.schedule.schedule import Schedule, make_schedule
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Layout


@dataclass(frozen=True)
class Stages:
    """Parts of a model with the schedule that computes them."""

    parts: tuple[ModelPart, ...]
    schedule: Schedule
    durations: Durations
    """Expected durations of the chunks' passes, in FLOPs per token."""

    def of(self, stage: int) -> dict[int, ModelPart]:
        """Return the chunks of a stage with their parts."""
        return {chunk: self.parts[chunk] for chunk, at in enumerate(self.schedule.stage_of) if at == stage}


def cut(
    model: ModelConfig, chunks: int, explicit: Sequence[int] | None = None, costs: Sequence[float] = ()
) -> tuple[ModelPart, ...]:
    """Split the model into `chunks` parts of equal time, or as in `explicit`; raise `NumbersError` if impossible.

    `costs`: time of each layer in any unit, of multi-token prediction and of the head; (): their FLOPs.
    """
    spans = [range(model.layers)]
    if chunks > 1 or explicit is not None:
        costs = list(costs or _costs(model))
        costs[model.layers - 1 :] = [sum(costs[model.layers - 1 :])]
        spans = split_layers(model.layers, chunks, explicit, costs)
    parts = [ModelPart(layers) for layers in spans]
    parts[0] = replace(parts[0], first=True)
    parts[-1] = with_end(model, parts[-1].layers, first=chunks == 1)
    return tuple(parts)


def with_end(model: ModelConfig, layers: range, first: bool) -> ModelPart:
    """Return the last part of a model: multi-token prediction and the head follow its `layers`."""
    return ModelPart(range(layers.start, layers.stop + model.mtp_layers), first, last=True)


def layer_counts(model: ModelConfig, parts: Sequence[ModelPart]) -> tuple[int, ...]:
    """Return the number of layers of each part, without those of multi-token prediction."""
    return tuple(len(part.layers) - part.last * model.mtp_layers for part in parts)


@lru_cache(maxsize=1000)
def default_layers(model: ModelConfig, chunks: int) -> tuple[int, ...]:
    """Return the number of layers of each of `chunks` parts if `parallel.layers` does not set them."""
    return layer_counts(model, cut(model, chunks))


def _costs(model: ModelConfig) -> list[float]:
    """Return each layer's forward FLOPs per token, the last one's with the head; the embedding takes no time."""
    costs = [layer_flops(model, layer, skips=model.full_layers is not None) for layer in range(model.num_blocks)]
    costs[-1] += head_flops(model)
    return costs


def shards_sums(layout: Layout) -> bool:
    """Return whether gradient sums are sharded, if the schedule reduces them after every micro-batch."""
    if layout.zero < 2:  # a search asks for layouts of a module alone, whose ranks cannot share the experts
        return False
    return layout.shards > 1 or (layout.splits_experts and ExpertLayout(layout).shards > 1)


def one_micro_batch(schedule: Schedule) -> Schedule:
    """Return a schedule for one micro-batch, or for the smallest number that its kind allows."""
    for count in range(1, schedule.micro_batches):
        with suppress(NumbersError):
            numbers = schedule.stages, schedule.virtual_stages, count
            return replace(make_schedule(schedule.name, *numbers, schedule.reduce_each), turns=schedule.turns)
    return schedule


def compute_apart(schedule: Schedule, layout: Layout) -> bool:
    """Return whether replicas may compute different numbers of micro-batches, as they only meet once per step."""
    gathers_each = layout.zero == 3 and layout.shards > 1
    return layout.data > 1 and not (schedule.reduce_each or gathers_each or layout.splits_experts)


def deal(total: int, slowness: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Divide `total` micro-batches among the replicas so that the last one ends as early as possible.

    Numbers are positive multiples of `unit`, which divides `total`; `slowness` is the replicas' time per micro-batch.
    """
    counts = [unit] * len(slowness)
    ends = sorted((2 * unit * slow, replica) for replica, slow in enumerate(slowness))  # with one unit more: a heap
    for _ in range(total // unit - len(slowness)):
        replica = ends[0][1]
        counts[replica] += unit
        heapreplace(ends, ((counts[replica] + unit) * slowness[replica], replica))
    return tuple(counts)


def shares_of(config: RunConfig, layout: Layout, slowness: Sequence[float]) -> tuple[int, ...]:
    """Return each replica's micro-batches with which a step takes least time; empty: equal numbers.

    They stay equal where replicas do not compute apart, where others save no time, where the schedule refuses one, and
    where a replica would keep more activations: an interleaved schedule may, also with fewer micro-batches.
    """
    even = plan_stages(config, layout).schedule
    unit, total = one_micro_batch(even).micro_batches, config.batch.global_size // config.batch.micro_size
    if not compute_apart(even, layout) or total % unit or total < unit * layout.data:
        return ()
    shares = deal(total, slowness, unit)
    if max(map(mul, shares, slowness)) < even.micro_batches * max(slowness):
        with suppress(ConfigError):  # a schedule may refuse some multiples of its smallest number
            schedules = [plan_stages(config, layout, share).schedule for share in {*shares}]
            if all(all(map(le, one.peak_live(), even.peak_live())) for one in schedules):
                return shares
    return ()


def plan_stages(config: RunConfig, layout: Layout, micro_batches: int | None = None) -> Stages:
    """Split the model into chunks of equal time, or as in `parallel.layers`, and make the schedule.

    `micro_batches`: of a replica; None: as many as each has if all have equal numbers.
    """
    # Raises ConfigError, which names the keys, if the schedule does not allow these numbers or the layers do not fit.
    parallel, chunks = config.parallel, layout.pipeline * layout.virtual_stages
    micro_batches = micro_batches or config.batch.accumulation(layout.data)
    problems = []
    try:
        numbers = layout.pipeline, layout.virtual_stages, micro_batches
        schedule = make_schedule(parallel.schedule, *numbers, shards_sums(layout))
        schedule = replace(schedule, turns=OVERLAPPED if parallel.two_batch_overlap else ())
    except NumbersError as error:
        key, rule = "schedule", error.rule
        if parallel.schedule in SCHEDULES and allows(parallel.schedule, layout.virtual_stages):
            rule = str(error)  # a registered schedule may refuse other numbers too
        elif parallel.schedule in SCHEDULES:
            key = "virtual_stages"
        problems.append(Problem(f"parallel.{key}", getattr(parallel, key), rule))
    try:
        parts = cut(config.model, chunks, parallel.layers)
    except NumbersError as error:
        layers = "null" if parallel.layers is None else list(parallel.layers)
        problems.append(Problem("parallel.layers", layers, error.rule))
    if problems:
        raise ConfigError(problems)
    costs, recomputed = _costs(config.model), config.memory.recomputed_layers
    forward = [sum(costs[layer] for layer in part.layers) for part in parts]
    recompute = [sum(costs[layer] for layer in part.layers[:recomputed]) for part in parts]
    backward = list(map(sum, zip(forward, recompute, strict=True)))
    return Stages(parts, schedule, Durations(forward, backward, forward))
