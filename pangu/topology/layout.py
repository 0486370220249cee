"""A layout: the degrees of parallelism and what follows from them. Pure functions, no process, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pangu.config.schema import ParallelConfig

AXES = ("pipeline", "data", "tensor")
"""Mesh axes, slowest first: neighbouring ranks form a tensor-parallel group, so its heavy traffic stays inside a
node."""


@dataclass(frozen=True)
class Coordinates:
    pipeline: int
    data: int
    tensor: int


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

    def __post_init__(self) -> None:
        assert min(self.tensor, self.pipeline, self.data, self.virtual) >= 1, self

    @classmethod
    def of(cls, config: ParallelConfig, data: int) -> Layout:
        return cls(
            config.tensor, config.pipeline, data, config.zero, config.sequence, config.virtual, config.zero_group or 0
        )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def model(self) -> int:
        """Devices that together hold one copy of the model."""
        return self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline=pipeline, data=data, tensor=tensor)

    def rank(self, at: Coordinates) -> int:
        """Global rank at these coordinates; the inverse of `coordinates`."""
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    @property
    def shards(self) -> int:
        """Replicas that a flat parameter is sharded over."""
        return (self.zero_group or self.data) if self.zero else 1

    def peers(self, rank: int, axis: str) -> list[int]:
        """Global ranks along one axis through `rank`, in the order of that coordinate. Beside `AXES`: `shard` and
        `gather`, the neighbouring replicas that share a flat parameter (one group for gradients, one for weights);
        `copies`, the replicas that hold the same shard; `ends`, the first and the last stage."""
        at = self.coordinates(rank)
        start = at.data - at.data % self.shards
        places = {
            "shard": range(start, start + self.shards),
            "gather": range(start, start + self.shards),
            "copies": range(at.data % self.shards, self.data, self.shards),
            "ends": (0, self.pipeline - 1),
        }.get(axis)
        along = {"shard": "data", "gather": "data", "copies": "data", "ends": "pipeline"}.get(axis, axis)
        return [self.rank(replace(at, **{along: p})) for p in places or range(getattr(self, along))]
