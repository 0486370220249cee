"""Bytes that a rank keeps for parameters, gradients and optimizer state, padding included.

They follow from the flat parameters and buffers that a run allocates (Rajbhandari et al. 2020, section 5). Transient
memory is left to a dry run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import PlacementTable, TensorRank
from pangu.zero.grouping import Sharding, buffer_table, divide

if TYPE_CHECKING:  # planning does not need torch
    from torch import Tensor
    from torch.optim import Optimizer

    from pangu.zero.flat_parameter import FlatParameter

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of each compute format."""
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
"""Purpose of each buffer of a flat parameter."""
HOST = " on the host"


def sum_bytes(config: RunConfig) -> int:
    """Return the bytes per element of losses, gradient sums and main parameters: fp32, or fp64 in fp64."""
    return max(4, BYTES[config.precision.compute])


@dataclass(frozen=True)
class StatePlan:
    """Memory that one rank keeps between steps."""

    bytes: dict[str, int]
    """Bytes by purpose; entries ending in `HOST` live in host memory."""

    @property
    def on_device(self) -> int:
        """Bytes on the device."""
        return sum(count for name, count in self.bytes.items() if not name.endswith(HOST))

    def words(self) -> str:
        """Format the plan like `24.0 MiB: parameters 8.0 MiB, gradients 8.0 MiB, ...`."""
        parts = ", ".join(f"{name} {size(count)}" for name, count in self.bytes.items())
        return f"{size(sum(self.bytes.values()))}: {parts}"


def plan_states(config: RunConfig, layout: Layout, rank: int, parts: Mapping[int, ModelPart]) -> StatePlan:
    """Return the memory that a rank keeps for the chunks `parts` of its stage, from the configuration alone."""
    at = layout.coordinates(rank)
    share = None
    shardings = {False: Sharding.of(layout, at, config.memory.offload)}
    if layout.splits_experts:
        share, shardings[True] = ExpertRank.of(layout, at), Sharding.of(layout, at, config.memory.offload, experts=True)
    tensor_rank = TensorRank(at.tensor, layout.tensor, layout.sequence)
    table = place_tensors(config.model, list(parts.values()), tensor_rank, config.train.frozen, share)
    numel = {name: math.prod(shape) for name, shape in table.shapes.items()}
    used = {chunk: parameters_by_module(config.model, table, part) for chunk, part in parts.items()}
    narrow, wide = BYTES[config.precision.compute], sum_bytes(config)
    moment = 2 if config.optimizer.moments == "bf16" else wide
    total: Counter[str] = Counter()

    def add(chunk: int, names: list[str]) -> None:
        sharding = shardings[table.is_expert(names[0])]
        padded = sharding.padded(sum(numel[name] for name in names))
        trained = table.is_trained(names[0])
        for row in buffer_table(padded, narrow < wide, sharding, trained):
            if row.alias is None and row.lasting:
                total[PURPOSES[row.name] + HOST * row.on_host] += row.numel * (wide if row.wide else narrow)
        if trained and (unpadded := _unpadded(table, names, numel, sharding.span(padded))):
            total[MOMENTS + HOST * ("optimizer" in sharding.offload)] += 2 * unpadded * moment

    divide(table, used, config.parallel.bucket_bytes(layout.zero, layout.replicas), add)
    return StatePlan(dict(total))


def _unpadded(table: PlacementTable, names: Iterable[str], numel: Mapping[str, int], shard: slice) -> int:
    """Return the number of elements of logical tensors in a shard, without padding of the shard or the vocabulary."""
    begin = total = 0
    for name in names:
        for entry in table.stored_in(name):
            start = begin + entry.offset
            total += max(0, min(start + entry.local_numel, shard.stop) - max(start, shard.start))
        begin += numel[name]
    return total


def peak_states(config: RunConfig, layout: Layout, parts_of: Callable[[int], Mapping[int, ModelPart]]) -> StatePlan:
    """Return the plan of the rank that keeps most, given the parts of each stage."""
    # This is the first rank of a stage: the others have more of the padding.
    firsts = [layout.rank(Coordinates(pipeline=stage, data=0, tensor=0)) for stage in range(layout.pipeline)]
    if not config.train.frozen:
        # stages between the first and the last are alike
        has_experts = config.model.has_experts
        shapes = {
            rank: tuple(
                (len(part.layers), sum(map(has_experts, part.layers)), part.first, part.last)
                for part in parts_of(stage).values()
            )
            for stage, rank in enumerate(firsts)
        }
        firsts = list({shape: rank for rank, shape in shapes.items()}.values())
    plans = (plan_states(config, layout, rank, parts_of(layout.coordinates(rank).pipeline)) for rank in firsts)
    return max(plans, key=lambda plan: sum(plan.bytes.values()))


def held_bytes(units: Iterable[FlatParameter], optimizer: Optimizer) -> dict[str, int]:
    """Return `StatePlan.bytes` as measured from the buffers that exist."""
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
