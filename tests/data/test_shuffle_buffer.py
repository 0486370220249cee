"""The shuffle of documents that pass by."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.data.order import ShuffleBuffer


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    span=st.integers(0, 400),
    key=st.integers(0, 1000),
    ahead=st.integers(1, 20),
    data=st.data(),
)
def test_a_shuffle_buffer_is_a_bounded_permutation_that_goes_on_anywhere(
    lengths: list[int], span: int, key: int, ahead: int, data: st.DataObject
) -> None:
    begins = [sum(lengths[:number]) for number in range(len(lengths))]

    def taken(after: tuple[int, int, int] | None, ahead: int) -> list[tuple[tuple[int, int, int], int]]:
        """What comes in two epochs, from a turn on, where so many documents are read at once."""
        shuffle: ShuffleBuffer[int] = ShuffleBuffer(span, key)
        result = []
        for epoch in (0, 1):
            for number, begin in enumerate(begins):
                turn = shuffle.turn(epoch, begin, number)
                assert 0 <= turn[1] - begin <= span
                if after is None or turn > after:
                    shuffle.push(turn, number)
                if (number + 1) % ahead == 0:
                    while item := shuffle.pop(epoch, begin + lengths[number]):
                        result.append(item)
                    read = begin + lengths[number]
                    waiting = [n for (e, _, n), _ in shuffle._waiting if e == epoch]
                    assert all(begins[n] > read - span - lengths[n] - 1 for n in waiting)
            while item := shuffle.pop(epoch + 1, 0):
                result.append(item)
        return result

    whole = taken(None, ahead)
    numbers = [number for _, number in whole]
    assert sorted(numbers[: len(lengths)]) == sorted(numbers[len(lengths) :]) == list(range(len(lengths)))
    assert whole == sorted(whole)
    assert taken(None, 1) == whole
    if not span:
        assert numbers == 2 * list(range(len(lengths)))
    place = data.draw(st.integers(0, len(whole) - 1))
    assert taken(whole[place][0], ahead) == whole[place + 1 :]


def test_a_shuffle_buffer_mixes() -> None:
    """Every delay up to the span is equally likely, and keys choose it."""
    delays = [ShuffleBuffer(999, 1).turn(0, 0, number)[1] for number in range(5000)]
    assert np.std(np.histogram(delays, bins=10, range=(0, 1000))[0]) < 3 * np.sqrt(500)
    assert min(delays) < 5 < 995 < max(delays)
    assert delays != [ShuffleBuffer(999, 2).turn(0, 0, number)[1] for number in range(5000)]
