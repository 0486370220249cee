"""Layout of a run as the planner knows it: how a model is spread over ranks, and how a step is scheduled."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import Literal, NamedTuple

from pangu.config.schema import RunConfig
from pangu.topology.layout import Layout

Recompute = Literal["none", "selective", "full"]
LAYOUT = tuple(field.name for field in fields(Layout))
"""Fields of a plan that are those of its layout."""
_degrees = attrgetter(*LAYOUT)


class Plan(NamedTuple):
    """Layout and schedule of a model."""

    tensor: int
    pipeline: int
    virtual: int
    data: int
    context: int
    zero: int
    sequence: bool
    recompute: Recompute
    micro_size: int
    micro_batches: int
    schedule: str
    layers: tuple[int, ...] = ()
    """Layers of each chunk; (): as even as possible."""
    recomputed: int = 0
    """Layers of each chunk that are recomputed in full, with `recompute` = none."""
    zero_group: int = 0
    """Replicas that share model states; 0: all."""
    offload: tuple[Literal["activations", "optimizer", "parameters"], ...] = ()
    """Kinds of tensors kept in host memory; see `memory.offload`."""
    chunks: int = 1
    """Number of chunks a matmul is split into, so that communication overlaps computation."""
    expert: int = 1
    """Expert-parallel size: ranks that share the experts of each layer."""
    expert_tensor: int = 0
    """Tensor-parallel ranks that share each expert; 0: all."""
    context_kind: str = "auto"
    """Kind of context parallelism; see `parallel.context_kind`."""

    @property
    def layout(self) -> Layout:
        """Parallel degrees of the plan."""
        return Layout(*_degrees(self))

    @property
    def recomputes(self) -> bool:
        """True if activations are recomputed."""
        return self.recompute != "none" or self.recomputed > 0

    @property
    def replicas(self) -> int:
        """Ranks with the same weights and different tokens."""
        return self.data * self.context

    @property
    def axes(self) -> int:
        """Number of axes with more than one rank, each of which has at least one communicating group."""
        return sum(size > 1 for size in (self.tensor, self.context, self.data, self.pipeline, self.expert))


def configured(config: RunConfig, plan: Plan) -> RunConfig:
    """Return a configuration with the layout of a plan, for one step of its micro-batches."""
    keys = {name: getattr(plan, name) for name in (*LAYOUT, "schedule", "context_kind")}
    keys |= {"zero_group": plan.zero_group or None, "expert_tensor": plan.expert_tensor or None}
    parallel = replace(config.parallel, **keys, overlap_chunks=plan.chunks, layers=plan.layers or None)
    batch = replace(
        config.batch, micro_size=plan.micro_size, global_size=plan.micro_batches * plan.micro_size * plan.data
    )
    memory = replace(config.memory, recompute=plan.recomputed or plan.recompute, offload=plan.offload)
    return replace(config, parallel=parallel, batch=batch, memory=memory, dry_run=False)
