"""Layouts are numbers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pangu.topology import experts
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import AXES, GROUPS, Layout
from tests.layouts import FEW, layouts

DEGREES = st.integers(1, 6)


@given(DEGREES, DEGREES, DEGREES, FEW)
def test_rank_and_coordinates_are_inverse(tensor: int, pipeline: int, data: int, context: int) -> None:
    layout = Layout(tensor, pipeline, data, context=context)
    seen = {layout.coordinates(rank) for rank in range(layout.world)}
    assert len(seen) == layout.world == tensor * pipeline * data * context
    assert all(layout.rank(layout.coordinates(rank)) == rank for rank in range(layout.world))


def test_neighbours_share_a_tensor_group() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert [layout.coordinates(rank).tensor for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.coordinates(rank).data for rank in range(4)] == [0, 0, 1, 1]
    assert [layout.coordinates(rank).pipeline for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_neighbouring_tensor_groups_share_a_sequence() -> None:
    layout = Layout(tensor=2, data=2, context=2)
    assert [layout.coordinates(rank).context for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.coordinates(rank).data for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.peers(5, "replicas") == [1, 3, 5, 7]
    assert layout.peers(5, "context") == [5, 7]


@given(layouts())
def test_the_groups_of_an_axis_part_the_ranks_and_each_rank_finds_the_same_group(layout: Layout) -> None:
    axes: list[tuple[Layout | ExpertLayout, str]] = [(layout, axis) for axis in {*AXES, *GROUPS} - {"ends"}]
    for along, axis in (*axes, *((ExpertLayout(layout), axis) for axis in experts.GROUPS)):
        groups = [tuple(along.peers(rank, axis)) for rank in range(layout.world)]
        assert all(rank in group for rank, group in enumerate(groups)), axis
        assert all(groups[peer] == group for group in groups for peer in group), axis
        assert len({len(set(group)) for group in groups}) == 1, axis


@given(layouts())
def test_a_flat_parameter_is_sharded_over_ranks_that_hold_it(layout: Layout) -> None:
    """Shards and copies together are the replicas, of experts those of the same share; and a group holds all experts
    of one stage, each once."""
    apart = ExpertLayout(layout)
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        for along, before in ((layout, ""), (apart, "expert_")):
            shards = along.peers(rank, f"{before}shard")
            assert len(shards) == along.shards
            assert shards == along.peers(rank, f"{before}gather")
            replicas = sorted(peer for one in shards for peer in along.peers(one, f"{before}copies"))
            assert replicas == along.peers(rank, f"{before}replicas")
        share, replica = apart.place(at)
        of_group = [apart.place(layout.coordinates(peer)) for peer in apart.peers(rank, "expert")]
        assert of_group == [(one, replica) for one in range(layout.expert)]
        copies = [apart.place(layout.coordinates(peer)) for peer in apart.peers(rank, "expert_replicas")]
        assert copies == [(share, one) for one in range(apart.replicas)]
        slices = {layout.coordinates(peer).tensor for peer in apart.peers(rank, "expert_replicas")}
        assert apart.tensor == 1 or slices == {at.tensor}


@given(layouts())
def test_experts_that_nothing_splits_lie_where_other_weights_do(layout: Layout) -> None:
    plain = replace(layout, expert=1, expert_tensor=0)
    assert not plain.splits_experts
    for rank in range(plain.world):
        for axis in ("replicas", "shard", "gather", "copies"):
            assert ExpertLayout(plain).peers(rank, f"expert_{axis}") == plain.peers(rank, axis)


def test_whole_experts_lie_on_tensor_parallel_ranks_first() -> None:
    """Two tensor-parallel ranks, four replicas; cut over the ranks, and whole."""
    cut, whole = Layout(2, data=4, expert=2), Layout(2, data=4, expert=2, expert_tensor=1, zero=1, zero_group=2)
    cut, whole = ExpertLayout(cut), ExpertLayout(whole)
    assert cut.peers(5, "expert") == [5, 7]
    assert cut.peers(5, "expert_replicas") == [1, 5]
    assert whole.peers(5, "expert") == [4, 5]
    assert whole.peers(5, "expert_replicas") == [1, 3, 5, 7]
    assert whole.peers(5, "expert_shard") == [5, 7]
    assert whole.peers(5, "expert_copies") == [1, 5]
