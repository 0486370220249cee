"""Layout: the degrees of parallelism, and pure functions between ranks and coordinates, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pangu.common.errors import UserError
from pangu.config.schema import ParallelConfig

AXES = ("pipeline", "data", "context", "tensor")
"""Mesh axes, slowest first: neighboring ranks form a tensor-parallel group, whose heavy traffic stays in a node."""
GROUPS = ("pipeline", "context", "tensor", "replicas", "shard", "gather", "copies", "ends")
"""Axes along which ranks communicate, in the order in which the groups are created."""


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank along each mesh axis."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a run."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks also shard the hidden states between the matrices."""
    virtual_stages: int = 1
    """Virtual stages: model chunks per pipeline stage."""
    zero_group: int = 0
    """Number of replicas that ZeRO shards over; 0: all."""
    context: int = 1
    """Context-parallel size: ranks that split each sequence."""
    expert: int = 1
    """Expert-parallel size: neighboring ranks of one stage that split the experts of each layer."""
    expert_tensor: int = 0
    """Tensor-parallel ranks that split each expert: all (0) or one (1), which turns the others into replicas."""

    def __post_init__(self) -> None:
        """Raise `UserError` if a degree is out of range."""
        degrees = (self.tensor, self.pipeline, self.data, self.virtual_stages, self.context, self.expert)
        if min(degrees) < 1 or self.zero not in range(4):
            raise UserError(f"{self}: degrees must be at least 1, and zero 0, 1, 2 or 3")
        assert self.expert_tensor in (0, 1, self.tensor), self

    @classmethod
    def of(cls, config: ParallelConfig, data: int) -> Layout:
        """Return the layout of a configuration with `data` data-parallel replicas."""
        return cls(
            config.tensor,
            config.pipeline,
            data,
            config.zero,
            config.sequence,
            config.virtual_stages,
            config.zero_group or 0,
            config.context,
            config.expert,
            config.expert_tensor or 0,
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same slice of the non-expert weights and compute on different tokens."""
        return self.data * self.context

    @property
    def axes(self) -> int:
        """Number of axes with more than one rank, each of which has at least one group."""
        return sum(size > 1 for size in (self.tensor, self.context, self.data, self.pipeline, self.expert))

    @property
    def splits_experts(self) -> bool:
        """True if the experts are placed on other ranks than the remaining weights would be (`topology.experts`)."""
        return self.expert > 1 or self.expert_tensor not in (0, self.tensor)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank."""
        assert 0 <= rank < self.world, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor, context)

    def rank(self, at: Coordinates) -> int:
        """Return the global rank at these coordinates: the inverse of `coordinates`."""
        return (at.pipeline * self.replicas + self.replica(at)) * self.tensor + at.tensor

    def replica(self, at: Coordinates) -> int:
        """Return the index among the `replicas` at these coordinates."""
        return at.data * self.context + at.context

    @property
    def shards(self) -> int:
        """Number of replicas that a flat parameter is sharded over; 1 without ZeRO."""
        return (self.zero_group or self.replicas) if self.zero else 1

    def peers(self, rank: int, axis: str) -> list[int]:
        """Return the global ranks along one axis through `rank`, in the order of that coordinate.

        Besides `AXES`: `replicas`; `shard` and `gather`, neighboring replicas that share a flat parameter (separate
        groups for gradients and weights); `copies`, the replicas of one shard; `ends`, the first and last stage.
        """
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
    """Return the indices of the replicas along a replica axis through index `replica`."""
    start = replica - replica % shards
    return {
        "replicas": range(replicas),
        "shard": range(start, start + shards),
        "gather": range(start, start + shards),
        "copies": range(replica % shards, replicas, shards),
    }[axis]
