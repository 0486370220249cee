"""What a rank keeps of parameters, gradients and optimizer state, and what replicas send each other, to the byte.

Rajbhandari et al. 2020, sections 5 and 7, with what is usually left out: padding, buffers, and what a tied word
embedding or a head that stays gathered saves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.models.parameters import parameters_by_module, place_tensors
from pangu.pipeline.actions import Kind
from pangu.pipeline.stages import Stages
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import TensorRank
from pangu.zero.grouping import IN_FLIGHT, Sharding, backward_order, buffer_table, divide, trained_modules

if TYPE_CHECKING:  # a plan is made without torch
    from torch import Tensor
    from torch.optim import Optimizer

    from pangu.zero.flat_parameter import FlatParameter

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in each compute format."""
PARAMETERS, GRADIENTS, MASTERS, MOMENTS = "parameters", "gradients", "master weights", "moments"
PURPOSES = {
    "weights": PARAMETERS,
    "local": PARAMETERS,
    "total": GRADIENTS,
    "grad": GRADIENTS,
    "host_grad": GRADIENTS,
    "rounded": MASTERS,
    "main": MASTERS,
}
"""What each of a unit's buffers is for."""
HOST = " on the host"
GATHERED, UNDER_WAY = "gathered weights", "whole gradients"


def sum_bytes(config: RunConfig) -> int:
    """Bytes of a number of the loss, of sums of gradients and of master weights: fp32, in fp64 fp64."""
    return max(4, BYTES[config.precision.compute])


@dataclass(frozen=True, eq=False)
class FlatParameterPlan:
    """A unit in numbers (see `zero.units`)."""

    chunk: int
    trained: bool
    padded: int
    kept: int
    """Elements of logical tensors in this rank's share, without padding of the unit or of a vocabulary."""


@dataclass(frozen=True)
class StatePlan:
    """What one rank keeps and sends."""

    bytes: dict[str, int]
    """By what it is for, `HOST` behind what lies there; it is there all the time."""
    buffers: dict[str, int]
    """Most bytes there are at a time of what comes and goes."""
    sent_gradients: int
    """Bytes of gradients that a rank sends in a step; those of a hybrid sharding's copies come on top."""
    sent_weights: int
    """Bytes of weights."""

    def words(self) -> str:
        """`24.0 MiB: parameters 8.0 MiB, gradients 8.0 MiB, ...`."""
        kept = ", ".join(f"{name} {size(count)}" for name, count in self.bytes.items())
        return f"{size(sum(self.bytes.values()))}: {kept}"


def plan_states(config: RunConfig, layout: Layout, rank: int, stages: Stages) -> StatePlan:
    """What a rank keeps, from the configuration alone."""
    at = layout.coordinates(rank)
    sharding = Sharding.of(layout, at.data, config.memory.offload)
    units, uses, learning = _plan_units(config, layout, rank, stages, sharding)
    narrow, wide = BYTES[config.precision.compute], sum_bytes(config)
    message = 2 if config.precision.reduce == "bf16" else wide
    accumulation = config.batch.global_size // (config.batch.micro_size * layout.data)
    each = stages.schedule.reduce_each
    learned = [unit for unit in units if unit.trained]

    # those that several chunks use are reduced once
    gradients = sum(unit.padded * (accumulation if each and unit.chunk >= 0 else 1) for unit in learned) * message
    weights, gathered = 0, 0
    if sharding.stage in (1, 2):
        weights = sum(unit.padded for unit in learned)
    elif sharding.stage == 3:
        holds = Counter(action.chunk for action in stages.schedule.actions[at.pipeline] if action.kind is Kind.UNSHARD)
        for chunk, using in uses.items():
            back = backward_order(list(using), learning)
            if chunk in holds:
                held, again = (
                    sum(unit.padded for unit in {unit for name in names for unit in using[name]})
                    for names in (using, back)
                )
                weights += held + (holds[chunk] - 1) * again
                gathered = max(gathered, held)
            else:
                weights += accumulation * sum(unit.padded for unit in _gathers(using, back))
                gathered = max(gathered, _most_at_once(using, back))
    others = (layout.shards - 1) / layout.shards
    ring = (layout.data - 1) / layout.data
    whole = [unit.padded for unit in learned]
    # of the unit in backward, of those that are being reduced, and what these receive; a stage may be frozen
    at_once = (2 * IN_FLIGHT + 1) * max(whole, default=0) if each else sum(whole)
    buffers = {
        GATHERED: gathered * narrow,
        UNDER_WAY: wide * at_once if sharding.stage >= 2 and sharding.size > 1 else 0,
    }
    return StatePlan(
        bytes=_kept(config, units, sharding),
        buffers={name: count for name, count in buffers.items() if count},
        sent_gradients=round(gradients * (others if layout.shards > 1 else 2 * ring)),
        sent_weights=round(weights * narrow * others),
    )


def fullest_states(config: RunConfig, layout: Layout, stages: Stages) -> StatePlan:
    """The plan of the rank that keeps most. It is the first rank of a stage: the others have more of the padding."""
    firsts = [layout.rank(Coordinates(pipeline=stage, data=0, tensor=0)) for stage in range(layout.pipeline)]
    if not config.train.frozen:
        # what lies between the first and the last stage is alike
        shapes = {
            rank: tuple((len(part.layers), part.first, part.last) for part in stages.of(stage).values())
            for stage, rank in enumerate(firsts)
        }
        firsts = list({shape: rank for rank, shape in shapes.items()}.values())
    plans = (plan_states(config, layout, rank, stages) for rank in firsts)
    return max(plans, key=lambda plan: sum(plan.bytes.values()))


Uses = Mapping[int, Mapping[str, list[FlatParameterPlan]]]
"""Chunk -> region -> the units that it uses."""


def _plan_units(
    config: RunConfig, layout: Layout, rank: int, stages: Stages, sharding: Sharding
) -> tuple[list[FlatParameterPlan], Uses, set[str]]:
    """The units of a rank, which regions use them, and the regions from which gradients come."""
    at = layout.coordinates(rank)
    parts = stages.of(at.pipeline)
    tensor_rank = TensorRank(at.tensor, layout.tensor, layout.sequence)
    table = place_tensors(config.model, list(parts.values()), tensor_rank, config.train.frozen)
    numel = {name: math.prod(shape) for name, shape in table.shapes.items()}
    used = {chunk: parameters_by_module(config.model, table, part) for chunk, part in parts.items()}

    def make(chunk: int, names: list[str]) -> FlatParameterPlan:
        padded = sharding.padded(sum(numel[name] for name in names))
        own, begin, kept = sharding.span(padded), 0, 0
        for name in names:
            for entry in table.stored_in(name):
                start = begin + entry.offset
                kept += max(0, min(start + entry.local_numel, own.stop) - max(start, own.start))
            begin += numel[name]
        return FlatParameterPlan(chunk, table.is_trained(names[0]), padded, kept)

    units, uses = divide(table, used, config.parallel.bucket_bytes, make)
    return units, uses, trained_modules(table, used)


def _kept(config: RunConfig, units: Iterable[FlatParameterPlan], sharding: Sharding) -> dict[str, int]:
    narrow, wide = BYTES[config.precision.compute], sum_bytes(config)
    moment = 2 if config.optimizer.moments == "bf16" else wide
    total: Counter[str] = Counter()
    for unit in units:
        for row in buffer_table(unit.padded, narrow < wide, sharding, unit.trained):
            if row.alias is None and row.lasting:
                total[PURPOSES[row.name] + HOST * row.on_host] += row.numel * (wide if row.wide else narrow)
        if unit.trained and unit.kept:
            total[MOMENTS + HOST * ("optimizer" in sharding.offload)] += 2 * unit.kept * moment
    return dict(total)


def _gathers(names: Mapping[str, list[FlatParameterPlan]], back: list[str]) -> list[FlatParameterPlan]:
    """Units that are gathered for a micro-batch, in order, with repetitions: what a region needs is there if the region
    before it used it too. The head stays gathered between forward and backward."""
    found: list[FlatParameterPlan] = []
    here: list[FlatParameterPlan] = []
    for order in (list(names), back):
        here = here if "head" in order else []
        for region in order:
            found += [unit for unit in names[region] if unit not in here]
            here = names[region]
    return found


def _most_at_once(names: Mapping[str, list[FlatParameterPlan]], back: list[str]) -> int:
    """Elements of the units that are whole while a region computes and the next one is gathered."""
    windows = [*((name,) for name in names), *pairwise(names), *pairwise(back)]
    sets = [{unit for region in window for unit in names[region]} for window in windows]
    return max(sum(unit.padded for unit in units) for units in sets)


def held_bytes(units: Iterable[FlatParameter], optimizer: Optimizer) -> dict[str, int]:
    """The same as `StatePlan.bytes`, of the buffers that are there."""
    total: dict[str, int] = {}
    seen: set[int] = set()

    def add(name: str, away: bool, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and (storage := tensor.untyped_storage())._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                total[name + HOST * away] = total.get(name + HOST * away, 0) + storage.nbytes()

    for unit in units:
        for row in unit.table:
            add(PURPOSES[row.name], row.on_host, getattr(unit, row.name))
        for shard in unit.shards:
            state = optimizer.state.get(shard.main, {})
            add(MOMENTS, unit.main_on_host, state.get("exp_avg"), state.get("exp_avg_sq"))
    return total


def tell_states(plan: StatePlan, held: Mapping[str, int], layout: Layout) -> list[str]:
    """The plan and what was measured, in a few lines."""
    lines = [f"{'memory':<12} {plan.words()}; measured {size(sum(held.values()))}"]
    if plan.buffers:
        lines.append(f"{'buffers':<12} at most " + ", ".join(f"{name} {size(n)}" for name, n in plan.buffers.items()))
    if layout.data > 1:
        sent = f"gradients {size(plan.sent_gradients)}, weights {size(plan.sent_weights)} a step"
        lines.append(f"{'sent':<12} to other replicas: {sent}")
    return lines
