"""Communication groups along each axis of the mesh, and their ranks per node."""

from __future__ import annotations

from typing import NamedTuple, cast

from pangu.pipeline.spans import Axis
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Layout


class Group(NamedTuple):
    """Size of a group of ranks that communicate."""

    size: int
    inside: int
    """Ranks per node."""


def groups_of(layout: Layout, node: int) -> dict[Axis, Group]:
    """Return the group of each axis on nodes of `node` devices."""
    tensor, replicas, shards, experts = layout.tensor, layout.replicas, layout.shards, ExpertLayout(layout)
    # stride between neighboring ranks of a group, and the size of the group
    strides: dict[Axis, tuple[int, int]] = {
        "tensor": (1, tensor),
        "context": (tensor, layout.context),
        "expert": (experts.tensor, layout.expert),
        "pipeline": (tensor * replicas, layout.pipeline),
        "world": (1, layout.world),
        **_of_replicas("", tensor, replicas, shards),
        **_of_replicas("expert_", experts.tensor * layout.expert, experts.replicas, experts.shards),
    }
    groups = {axis: Group(size, max(1, min(size, node // stride))) for axis, (stride, size) in strides.items()}
    whole = groups["pipeline"].inside == layout.pipeline
    return {**groups, "ends": Group(min(2, layout.pipeline), 2 if whole and layout.pipeline > 1 else 1)}


def _of_replicas(prefix: str, stride: int, replicas: int, shards: int) -> dict[Axis, tuple[int, int]]:
    names = {"replicas": (stride, replicas), "copies": (stride * shards, replicas // shards)}
    names |= dict.fromkeys(("shard", "gather"), (stride, shards))
    return {cast(Axis, prefix + name): group for name, group in names.items()}
