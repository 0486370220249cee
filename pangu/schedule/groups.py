"""Communication groups along each axis of the mesh, and their ranks per node."""

from __future__ import annotations

from typing import Any, NamedTuple

from pangu.schedule.spans import Axis
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Layout


class Group(NamedTuple):
    """Size of a group of ranks that communicate."""

    size: int
    inside: int
    """Ranks per node."""


def groups_of(layout: Layout, node: int) -> dict[Axis, Group]:
    """Return the group of each axis on nodes of `node` devices."""
    tensor, replicas, experts = layout.tensor, layout.replicas, ExpertLayout(layout)
    # stride between neighboring ranks of a group, and the size of the group
    strides: dict[Any, tuple[int, int]] = {
        "tensor": (1, tensor),
        "context": (tensor, layout.context),
        "expert": (experts.tensor, layout.expert),
        "pipeline": (tensor * replicas, layout.pipeline),
        "world": (1, layout.world),
    }
    expert_sizes = experts.tensor * layout.expert, experts.replicas, experts.shards
    for prefix, stride, size, shards in (("", tensor, replicas, layout.shards), ("expert_", *expert_sizes)):
        strides |= dict.fromkeys((f"{prefix}shard", f"{prefix}gather"), (stride, shards))
        strides |= {f"{prefix}replicas": (stride, size), f"{prefix}copies": (stride * shards, size // shards)}
    groups = {axis: Group(size, max(1, min(size, node // stride))) for axis, (stride, size) in strides.items()}
    whole = groups["pipeline"].inside == layout.pipeline
    return {**groups, "ends": Group(min(2, layout.pipeline), 2 if whole and layout.pipeline > 1 else 1)}
