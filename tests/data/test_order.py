"""The permutation and the blend."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.data.order import Blend, permuted


@settings(max_examples=60)
@given(size=st.integers(1, 1200), key=st.integers())
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


@given(size=st.integers(2, 2**62), places=st.sets(st.integers(0, 2**62), min_size=2, max_size=20), key=st.integers())
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


even = st.builds(lambda number, weight: [weight] * number, st.integers(1, 12), st.floats(0.01, 100))
steep = st.lists(st.integers(0, 9).map(lambda power: 1.7**power), min_size=2, max_size=8)
weights = st.one_of(st.lists(st.floats(0.05, 10), min_size=1, max_size=10), even, steep)
"""Any, equal ones, and ones of all sizes with some of them equal."""


def worst_drift(weights: list[float], counts: list[int]) -> Fraction:
    """Largest distance, in samples, of a dataset's count from its share of all counts."""
    exact = [Fraction(weight) for weight in weights]
    return max(abs(c - w * sum(counts) / sum(exact)) for c, w in zip(counts, exact, strict=True))


def follow(weights: list[float], made: Blend, start: int, length: int) -> None:
    """Every prefix from `start` on is within a sample of the weights, and indices count up."""
    counts = [0] * len(weights)
    if start:
        # a dataset's samples before `start`, told by the first one behind it
        for dataset in range(len(weights)):
            sample, found = start, made.locate(start)
            while found[0] != dataset:
                sample += 1
                found = made.locate(sample)
            counts[dataset] = found[1]
    assert sum(counts) == start
    for sample in range(start, start + length):
        dataset, index = made.locate(sample)
        assert index == counts[dataset]
        counts[dataset] += 1
        assert worst_drift(weights, counts) < 1


@settings(max_examples=60)
@given(weights=weights, start=st.one_of(st.just(0), st.integers(0, 3000), st.integers(0, 10**15)))
def test_every_prefix_of_a_blend_is_within_one_sample_of_its_weights(weights: list[float], start: int) -> None:
    """Prefixes of any length, of any number of datasets, of any weights."""
    follow(weights, Blend(weights), start, 100)


@pytest.mark.long
@settings(max_examples=100)
@given(weights=weights, start=st.one_of(st.just(0), st.integers(0, 10**15)))
def test_every_prefix_at_length(weights: list[float], start: int) -> None:
    follow(weights, Blend(weights), start, 1000)


@settings(max_examples=60)
@given(weights=weights, samples=st.lists(st.integers(0, 2000), min_size=1, max_size=4))
def test_a_place_in_a_blend_does_not_depend_on_how_it_was_come_to(weights: list[float], samples: list[int]) -> None:
    in_turn = Blend(weights)
    places = [in_turn.locate(sample) for sample in range(max(samples) + 1)]
    jumping = Blend(weights)
    for sample in samples:
        assert Blend(weights).locate(sample) == jumping.locate(sample) == places[sample]
        assert jumping.first_sample(*places[sample]) == sample


@pytest.mark.parametrize("weights", [[1 / 3, 2 / 3], [1.0] * 7, [0.7, 0.2, 0.1], [1.0, 9999.0]])
def test_a_million_samples_on_a_blend_has_not_drifted(weights: list[float]) -> None:
    """A dataset's sample k stands between k / w and (k + 1) / w."""
    made, million = Blend(weights), 10**6
    for dataset, weight in enumerate(weights):
        share = Fraction(weight) / sum(map(Fraction, weights))
        index = int(million * share)
        assert index / share - 1 < made.first_sample(dataset, index) < (index + 1) / share


def test_a_single_dataset_is_taken_as_it_is() -> None:
    made = Blend([3.5])
    assert [made.locate(sample) for sample in (0, 99, 100, 10**15)] == [(0, 0), (0, 99), (0, 100), (0, 10**15)]


def test_the_order_of_a_blend_is_fixed_for_ever() -> None:
    """A change here changes the data order of every run on a blend: raise ORDER_VERSION."""
    assert [Blend([5, 3, 2]).locate(sample)[0] for sample in range(10)] == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert [Blend([1, 1]).locate(sample)[0] for sample in range(6)] == [0, 1] * 3


@pytest.mark.parametrize("weights", [[1, 1, 2], [0.3, 0.7]])
def test_scale_of_weights_does_not_matter(weights: list[float]) -> None:
    scaled = Blend([64 * weight for weight in weights])
    assert [Blend(weights).locate(n) for n in range(100)] == [scaled.locate(n) for n in range(100)]
