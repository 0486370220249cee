"""Where the experts of a layer lie in layouts that split them (`Layout.splits_experts`): each rank has a share of them,
and the ranks that hold copies of an expert are others than those that hold copies of other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pangu.topology.layout import Coordinates, Layout, places_along
from pangu.topology.placement import Placement, TensorRank

GROUPS = ("expert", "expert_replicas", "expert_shard", "expert_gather", "expert_copies")
"""Axes of `ExpertLayout.peers`, in the order in which groups are made."""


@dataclass(frozen=True)
class ExpertLayout:
    layout: Layout

    def __post_init__(self) -> None:
        layout = self.layout
        assert layout.replicas * layout.tensor % (layout.expert * self.tensor) == 0, layout
        assert self.replicas % self.shards == 0, layout

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks that share each expert."""
        return self.layout.expert_tensor or self.layout.tensor

    @property
    def replicas(self) -> int:
        """Ranks that hold the same slice of an expert."""
        return self.layout.replicas * self.layout.tensor // (self.layout.expert * self.tensor)

    @property
    def shards(self) -> int:
        """Ranks that the flat parameters of experts are sharded over."""
        group = self.layout.shards * self.layout.tensor // (self.layout.expert * self.tensor)
        return max(1, group) if self.layout.zero else 1

    def place(self, at: Coordinates) -> tuple[int, int]:
        """Index of the share of the experts that a rank holds, and its index among the `replicas`."""
        # tensor 2, four replicas, expert 2: share and index
        #
        #     replica             0      1      2      3
        #     expert_tensor 2     0 0    1 0    0 1    1 1      the same on both tensor ranks
        #     expert_tensor 1     0 0    0 1    0 2    0 3      on the first tensor rank
        #                         1 0    1 1    1 2    1 3      on the second
        index = (self.layout.replica(at) * self.layout.tensor + at.tensor) // self.tensor
        replica, share = divmod(index, self.layout.expert)
        return share, replica

    def peers(self, rank: int, axis: str) -> list[int]:
        """As `Layout.peers`: `expert`, the ranks that hold all experts together; of the copies of an expert's weights
        `expert_replicas`, `expert_shard`, `expert_gather` and `expert_copies`."""
        share, replica = self.place(self.layout.coordinates(rank))
        if axis == "expert":
            return [rank + (place - share) * self.tensor for place in range(self.layout.expert)]
        places = places_along(axis.removeprefix("expert_"), replica, self.replicas, self.shards)
        return [rank + (place - replica) * self.tensor * self.layout.expert for place in places]

    def counts(self, at: Coordinates, is_cut: bool) -> bool:
        """Whether a rank is the first that holds its shard of an expert, if tensor-parallel ranks that share it hold
        different slices, or else the same."""
        return self.place(at)[1] < self.shards and (is_cut or self.tensor == 1 or at.tensor == 0)


@dataclass(frozen=True)
class ExpertRank:
    """A rank's share of the experts of each layer."""

    rank: int = 0
    size: int = 1
    tensor: TensorRank = field(default_factory=TensorRank)
    """Its place among the ranks that share each expert."""

    @classmethod
    def of(cls, layout: Layout, at: Coordinates) -> ExpertRank:
        experts = ExpertLayout(layout)
        tensor = TensorRank(at.tensor, layout.tensor, layout.sequence) if experts.tensor > 1 else TensorRank()
        return cls(experts.place(at)[0], layout.expert, tensor)

    def held(self, tensors: Sequence[Placement]) -> Sequence[Placement]:
        """Of the experts' `tensors`, in the order of the experts, this rank's."""
        share, rest = divmod(len(tensors), self.size)
        assert not rest, (len(tensors), self)
        return tensors[self.rank * share : (self.rank + 1) * share]
