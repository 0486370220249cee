"""The permutation and the blend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.data.order import blend, permuted


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 1200), key=st.integers())
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(2, 2**62), places=st.sets(st.integers(0, 2**62), min_size=2, max_size=20), key=st.integers())
@settings(deadline=None)
def test_large_permutations_stay_inside_and_apart(size: int, places: set[int], key: int) -> None:
    inside = {place % size for place in places}
    images = {permuted(place, size, "key", key) for place in inside}
    assert len(images) == len(inside)
    assert all(0 <= image < size for image in images)


def test_keys_choose_the_permutation() -> None:
    orders = [[permuted(index, 50, *keys) for index in range(50)] for keys in [(1, 0), (1, 1), (2, 0), ("1", 0)]]
    assert orders[0] != list(range(50))
    assert orders[0] == orders[3]  # parts of a key are compared by their text
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_every_place_is_equally_likely() -> None:
    """Chi-square of the image of each index over many keys, at five standard deviations."""
    size, draws = 6, 6000
    counts = np.zeros((size, size))
    for key in range(draws):
        for index in range(size):
            counts[index, permuted(index, size, key)] += 1
    expected = draws / size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_order_is_fixed_for_ever() -> None:
    """A change here changes the data order of every run: resumed runs would see other samples."""
    assert [permuted(index, 10, 1234, "order", 0, 0) for index in range(10)] == [3, 9, 6, 5, 7, 0, 1, 4, 8, 2]
    assert permuted(123_456_789, 10**12, 1234) == 804_873_130_515


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(deadline=None)
@given(weights=weights, period=st.sampled_from([100, 1000]))
def test_blend_keeps_proportions(weights: list[float], period: int) -> None:
    made = blend(weights, period)
    shares = np.array(weights) / sum(weights)
    assert made.counts.sum() == period == len(made.pattern)
    assert (np.bincount(made.pattern, minlength=len(weights)) == made.counts).all()
    assert (abs(made.counts - shares * period) < 1).all()
    for dataset, share in enumerate(made.counts / period):
        seen = np.cumsum(made.pattern == dataset)
        assert (abs(seen - share * np.arange(1, period + 1)) <= 1 + len(weights) / 2).all()


@settings(deadline=None)
@given(weights=weights, start=st.integers(0, 5000))
def test_blend_counts_up_within_each_dataset(weights: list[float], start: int) -> None:
    made = blend(weights, 100)
    located = [made.locate(sample) for sample in range(start, start + 250)]
    for dataset in {dataset for dataset, _ in located}:
        indices = [index for chosen, index in located if chosen == dataset]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
    for sample, (dataset, index) in enumerate(located, start):
        assert made.first_sample(dataset, index) == sample


def test_a_single_dataset_is_taken_as_it_is() -> None:
    made = blend([3.5], 100)
    assert [made.locate(sample) for sample in (0, 99, 100, 12_345)] == [(0, 0), (0, 99), (0, 100), (0, 12_345)]


def test_places_go_to_the_largest_remainders() -> None:
    assert blend([0.66, 0.34], 10).counts.tolist() == [7, 3]
    assert blend([0.34, 0.22, 0.44], 10).counts.tolist() == [4, 2, 4]


def test_even_weights_alternate() -> None:
    assert blend([1, 1], 10).pattern.tolist() == [0, 1] * 5


@pytest.mark.parametrize("weights", [[1, 1, 2], [0.3, 0.7]])
def test_scale_of_weights_does_not_matter(weights: list[float]) -> None:
    assert (blend(weights, 100).pattern == blend([64 * weight for weight in weights], 100).pattern).all()
