"""Layouts are numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pangu.topology.layout import Layout

DEGREES = st.integers(1, 6)


@given(DEGREES, DEGREES, DEGREES)
def test_rank_and_coordinates_are_inverse(tensor: int, pipeline: int, data: int) -> None:
    layout = Layout(tensor, pipeline, data)
    seen = {layout.coordinates(rank) for rank in range(layout.world)}
    assert len(seen) == layout.world == tensor * pipeline * data
    assert all(layout.rank(layout.coordinates(rank)) == rank for rank in range(layout.world))


def test_neighbours_share_a_tensor_group() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert [layout.coordinates(rank).tensor for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.coordinates(rank).data for rank in range(4)] == [0, 0, 1, 1]
    assert [layout.coordinates(rank).pipeline for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
