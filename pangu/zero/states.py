"""Bytes that a rank keeps for parameters, gradients and optimizer state, padding included.

They follow from the flat parameters and buffers that a run allocates (Rajbhandari et al. 2020, section 5). Transient
memory is left to a dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.models.parameters import ModelPart
from pangu.topology.layout import Coordinates, Layout
from pangu.zero.grouping import Buffer
from pangu.zero.stage_parameters import StageParameters

if TYPE_CHECKING:  # planning does not need torch
    from torch import Tensor
    from torch.optim import Optimizer

    from pangu.zero.flat_parameter import FlatParameter

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of each compute format."""
PARAMETERS, GRADIENTS, MASTERS, MOMENTS = "parameters", "gradients", "master weights", "moments"
PURPOSES = {
    "weights": PARAMETERS,
    "casts": PARAMETERS,
    "local": PARAMETERS,
    "total": GRADIENTS,
    "grad": GRADIENTS,
    "host_grad": GRADIENTS,
    "rounded": MASTERS,
    "main": MASTERS,
}
"""Purpose of each buffer of a flat parameter."""
HOST = " on the host"


class Formats(NamedTuple):
    """Bytes per element of each kind of buffer."""

    weights: int
    sums: int
    """Losses, gradients accumulated over micro-batches, and main parameters: fp32, or fp64 in fp64."""
    messages: int
    """Gradients sent to replicas."""
    moments: int
    matrix_moments: int = 2
    """Number of moments of an element of a layer's matrix: Muon keeps only the first."""

    @classmethod
    def of(cls, config: RunConfig) -> Formats:
        """Return the formats of a configuration."""
        wide = max(4, BYTES[config.precision.compute])
        sent = 2 if config.precision.reduce == "bf16" else wide
        moments = 2 if config.optimizer.moments == "bf16" else wide
        return cls(BYTES[config.precision.compute], wide, sent, moments, 1 if config.optimizer.name == "muon" else 2)

    def itemsize(self, row: Buffer) -> int:
        """Return the bytes per element of a buffer."""
        return 1 if row.fp8 else self.sums if row.wide else self.weights


@dataclass(frozen=True)
class StatePlan:
    """Memory that one rank keeps between steps."""

    bytes: dict[str, int]
    """Bytes by purpose; entries ending in `HOST` live in host memory."""

    def words(self) -> str:
        """Format the plan like `24.0 MiB: parameters 8.0 MiB, gradients 8.0 MiB, ...`."""
        parts = ", ".join(f"{name} {size(count)}" for name, count in self.bytes.items())
        return f"{size(sum(self.bytes.values()))}: {parts}"


def plan_states(config: RunConfig, layout: Layout, rank: int, parts: Mapping[int, ModelPart]) -> StatePlan:
    """Return the memory that a rank keeps for the chunks `parts` of its stage, from the configuration alone."""
    stage = StageParameters.of_run(config, layout, layout.coordinates(rank), parts, reduce_each=False)
    formats, total = Formats.of(config), Counter[str]()
    for flat in stage.flats:
        for row in flat.buffers(formats.weights < formats.sums).values():
            if row.alias is None and row.lasting:
                total[PURPOSES[row.name] + HOST * row.on_host] += row.numel * formats.itemsize(row)
        # neither padding of the shard nor of the vocabulary belongs to a tensor
        moments = 0
        for entry, span, _ in flat.shard_ranges(stage.table):
            moments += (span.stop - span.start) * (formats.matrix_moments if entry.is_matrix else 2)
        if flat.trained and moments:
            total[MOMENTS + HOST * flat.main_on_host] += moments * formats.moments
    return StatePlan(dict(total))


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
        for row in unit.table.values():
            add(PURPOSES[row.name], row.on_host, getattr(unit, row.name))
        for shard in unit.shards:
            state = optimizer.state.get(shard.main, {})
            add(MOMENTS, unit.main_on_host, state.get("exp_avg"), state.get("exp_avg_sq"))
    return total
