"""Expert parallelism (`Layout.splits_experts`): each rank holds a share of the experts, whose replicas differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pangu.topology.layout import Coordinates, Layout, places_along
from pangu.topology.placement import Placement, TensorRank

GROUPS = ("expert", "expert_replicas", "expert_shard", "expert_gather", "expert_copies")
"""Axes of `ExpertLayout.peers`, in the order in which the groups are created."""


@dataclass(frozen=True)
class ExpertLayout:
    """Sizes and groups of expert parallelism that follow from a layout."""

    layout: Layout

    def __post_init__(self) -> None:
        """Require that the sizes divide each other."""
        layout = self.layout
        assert layout.replicas * layout.tensor % (layout.expert * self.tensor) == 0, layout
        assert self.replicas % self.shards == 0, layout

    @property
    def tensor(self) -> int:
        """Number of tensor-parallel ranks that split each expert."""
        return self.layout.expert_tensor or self.layout.tensor

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same slice of an expert."""
        return self.layout.replicas * self.layout.tensor // (self.layout.expert * self.tensor)

    @property
    def shards(self) -> int:
        """Number of ranks that the flat parameters of experts are sharded over."""
        group = self.layout.shards * self.layout.tensor // (self.layout.expert * self.tensor)
        return max(1, group) if self.layout.zero else 1

    def place(self, at: Coordinates) -> tuple[int, int]:
        """Return the index of the expert share at these coordinates, and the rank's index among its `replicas`."""
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
        """Return the global ranks along one of `GROUPS` through `rank`, like `Layout.peers` for other weights."""
        share, replica = self.place(self.layout.coordinates(rank))
        if axis == "expert":
            return [rank + (place - share) * self.tensor for place in range(self.layout.expert)]
        places = places_along(axis.removeprefix("expert_"), replica, self.replicas, self.shards)
        return [rank + (place - replica) * self.tensor * self.layout.expert for place in places]

    def counts(self, at: Coordinates, is_cut: bool) -> bool:
        """Return whether a rank is the first with its expert shard; `is_cut`: tensor ranks hold different slices."""
        return self.place(at)[1] < self.shards and (is_cut or self.tensor == 1 or at.tensor == 0)


@dataclass(frozen=True)
class ExpertRank:
    """Share of the experts of each layer that a rank holds."""

    rank: int = 0
    size: int = 1
    tensor: TensorRank = field(default_factory=TensorRank)
    """Rank among the tensor-parallel ranks that split each expert."""

    @classmethod
    def of(cls, layout: Layout, at: Coordinates) -> ExpertRank:
        """Return the expert share at the coordinates `at` of a layout."""
        experts = ExpertLayout(layout)
        tensor = TensorRank(at.tensor, layout.tensor, layout.sequence) if experts.tensor > 1 else TensorRank()
        return cls(experts.place(at)[0], layout.expert, tensor)

    def held(self, tensors: Sequence[Placement]) -> Sequence[Placement]:
        """Return the tensors of this rank's experts, out of those of all experts in order."""
        share, rest = divmod(len(tensors), self.size)
        assert not rest, (len(tensors), self)
        return tensors[self.rank * share : (self.rank + 1) * share]
