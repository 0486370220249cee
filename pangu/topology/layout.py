"""A layout: the degrees of parallelism and what follows from them. Pure functions, no process, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pangu.config.errors import UserError
from pangu.config.schema import ParallelConfig

AXES = ("pipeline", "data", "context", "tensor")
"""Mesh axes, slowest first: neighbouring ranks form a tensor-parallel group, so its heavy traffic stays inside a
node."""
GROUPS = ("pipeline", "context", "tensor", "replicas", "shard", "gather", "copies", "ends")
"""Axes along which ranks communicate, in the order in which groups are made."""


@dataclass(frozen=True)
class Coordinates:
    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks also shard the hidden states between the matrices."""
    virtual: int = 1
    """Model chunks per pipeline stage."""
    zero_group: int = 0
    """Replicas that ZeRO shards over; 0: all."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks, neighbours of one stage, that share the experts of each layer."""
    expert_tensor: int = 0
    """Tensor-parallel ranks that share each expert: all (0) or one (1), which makes the others ranks like replicas."""

    def __post_init__(self) -> None:
        degrees = (self.tensor, self.pipeline, self.data, self.virtual, self.context, self.expert)
        if min(degrees) < 1 or self.zero not in range(4):
            raise UserError(f"{self}: degrees must be at least 1, and zero 0, 1, 2 or 3")
        assert self.expert_tensor in (0, 1, self.tensor), self

    @classmethod
    def of(cls, config: ParallelConfig, data: int) -> Layout:
        return cls(
            config.tensor,
            config.pipeline,
            data,
            config.zero,
            config.sequence,
            config.virtual,
            config.zero_group or 0,
            config.context,
            config.expert,
            config.expert_tensor or 0,
        )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same slices of weights that are no expert's, and compute with other tokens."""
        return self.data * self.context

    @property
    def splits_experts(self) -> bool:
        """Whether the weights of experts lie on other ranks than if they were any weights (`topology.experts`)."""
        return self.expert > 1 or self.expert_tensor not in (0, self.tensor)

    @property
    def model(self) -> int:
        """Devices that together hold one copy of the model."""
        return self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor, context)

    def rank(self, at: Coordinates) -> int:
        """Global rank at these coordinates; the inverse of `coordinates`."""
        return (at.pipeline * self.replicas + self.replica(at)) * self.tensor + at.tensor

    def replica(self, at: Coordinates) -> int:
        """Index among the `replicas`."""
        return at.data * self.context + at.context

    @property
    def shards(self) -> int:
        """Replicas that a flat parameter is sharded over."""
        return (self.zero_group or self.replicas) if self.zero else 1

    def peers(self, rank: int, axis: str) -> list[int]:
        """Global ranks along one axis through `rank`, in the order of that coordinate. Beside `AXES`: `replicas`;
        `shard` and `gather`, the neighbouring replicas that share a flat parameter (one group for gradients, one for
        weights); `copies`, the replicas that hold the same shard; `ends`, the first and the last stage."""
        at = self.coordinates(rank)
        if axis in AXES:
            return [self.rank(replace(at, **{axis: place})) for place in range(getattr(self, axis))]
        if axis == "ends":
            return [self.rank(replace(at, pipeline=stage)) for stage in (0, self.pipeline - 1)]
        replica = self.replica(at)
        return [
            rank + (place - replica) * self.tensor for place in places_along(axis, replica, self.replicas, self.shards)
        ]


def places_along(axis: str, replica: int, replicas: int, shards: int) -> range:
    """Indices of the replicas along one of their axes, of which one is `replica`."""
    start = replica - replica % shards
    return {
        "replicas": range(replicas),
        "shard": range(start, start + shards),
        "gather": range(start, start + shards),
        "copies": range(replica % shards, replicas, shards),
    }[axis]
