"""Layers are split as told, or as well as any split can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.pipeline.balance import split_layers


def counts(parts: list[range]) -> list[int]:
    return [len(part) for part in parts]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_no_split_has_a_smaller_largest_chunk(costs: list[int], data: st.DataObject) -> None:
    """Against all splits; of those with the same largest chunk none is more even."""
    chunks = data.draw(st.integers(1, len(costs)))
    parts = split_layers(len(costs), chunks, costs=costs)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert min(counts(parts)) >= 1

    def judged(cuts: list[tuple[int, int]]) -> tuple[int, int]:
        sums = [sum(costs[start:stop]) for start, stop in cuts]
        return max(sums), sum(value**2 for value in sums)

    ways = combinations(range(1, len(costs)), chunks - 1)
    best = min(judged(list(pairwise([0, *way, len(costs)]))) for way in ways)
    assert judged([(part.start, part.stop) for part in parts]) == best


@given(st.integers(1, 60), st.data())
def test_equal_layers_differ_by_one_at_most(num_layers: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, num_layers))
    sizes = counts(split_layers(num_layers, chunks))
    assert len(sizes) == chunks
    assert sizes == sorted(sizes)
    assert max(sizes) - min(sizes) <= 1


def test_embedding_and_head_take_the_place_of_layers() -> None:
    """GPT-2's head on a vocabulary of 50,257 costs about as much as 5 of its layers (hidden 768)."""
    costs = [1.0] * 12
    costs[-1] += 5
    assert counts(split_layers(12, 3, costs=costs)) == [5, 6, 1]
    costs[0] += 2
    assert counts(split_layers(12, 3, costs=costs)) == [4, 6, 2]


def test_layers_as_given() -> None:
    assert split_layers(6, 3, [1, 3, 2]) == [range(0, 1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("chunks", "explicit", "message"),
    [
        (8, None, "8 chunks for 6 layers: each needs a layer; use at most 6"),
        (3, [3, 3], r"\[3, 3\]: must be 3 numbers, one for each chunk"),
        (3, [2, 2, 3], r"\[2, 2, 3\]: must add up to the model's 6 layers, not 7"),
        (3, [0, 3, 3], r"\[0, 3, 3\]: each chunk needs at least one layer"),
    ],
)
def test_splits_that_are_refused(chunks: int, explicit: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_layers(6, chunks, explicit)
