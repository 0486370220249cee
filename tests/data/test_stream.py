"""Streams: which windows come when, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.data import stream as module
from pangu.data.indexed import IndexedTokens
from pangu.data.stream import SampleStream, SyntheticStream

WriteTokens = Callable[[str, int, Sequence[Sequence[int]]], IndexedTokens]
VOCAB = 5000


def counting(write_tokens: WriteTokens, size: int, name: str = "count") -> IndexedTokens:
    """A dataset in which token i is i, as two documents."""
    return write_tokens(name, VOCAB, [range(size // 3), range(size // 3, size)])


def test_plain_order(write_tokens: WriteTokens) -> None:
    stream = SampleStream([(counting(write_tokens, 33), 1.0)], sequence=8, vocab=VOCAB, seed=0, shuffle=False)
    assert stream.num_samples == 4
    assert [stream[index].tolist() for index in range(5)] == [
        [*range(0, 9)],
        [*range(8, 17)],
        [*range(16, 25)],
        [*range(24, 33)],
        [*range(0, 9)],
    ]
    assert stream[0].dtype == np.int64


def test_one_token_less_is_one_sample_less(write_tokens: WriteTokens) -> None:
    stream = SampleStream([(counting(write_tokens, 32), 1.0)], sequence=8, vocab=VOCAB, seed=0, shuffle=False)
    assert stream.num_samples == 3


@settings(max_examples=40)
@given(size=st.integers(9, 200), sequence=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_an_epoch_has_each_window_once(write_tokens: WriteTokens, size: int, sequence: int, seed: int) -> None:
    stream = SampleStream([(counting(write_tokens, size), 1.0)], sequence, VOCAB, seed)
    epoch = stream.num_samples
    assert epoch == max(1, size // sequence - 1)
    for first in (0, epoch, 5 * epoch):
        samples = [stream[index] for index in range(first, first + epoch)]
        assert all((np.diff(sample) == 1).all() and len(sample) == sequence + 1 for sample in samples)
        starts = sorted(int(sample[0]) for sample in samples)
        assert starts == list(range(starts[0], starts[0] + epoch * sequence, sequence))
        assert starts[0] < sequence
        assert starts[-1] + sequence < size


def test_epochs_differ_in_order_and_cut(write_tokens: WriteTokens) -> None:
    stream = SampleStream([(counting(write_tokens, 1000), 1.0)], 16, VOCAB, seed=1)
    epoch = stream.num_samples
    starts = [[int(stream[index][0]) for index in range(e * epoch, (e + 1) * epoch)] for e in range(40)]
    offsets = {start % 16 for epoch_starts in starts for start in epoch_starts}
    assert len(offsets) > 10
    orders = {tuple(start // 16 for start in epoch_starts) for epoch_starts in starts}
    assert len(orders) == 40


def test_all_tokens_are_seen_in_time(write_tokens: WriteTokens) -> None:
    """What the offsets cut off in one epoch comes in another; only the outermost tokens may wait long."""
    stream = SampleStream([(counting(write_tokens, 40), 1.0)], 8, VOCAB, seed=0)
    seen = {int(token) for index in range(400) for token in stream[index]}
    assert seen == set(range(40))


def test_seed_and_index_decide_alone(write_tokens: WriteTokens) -> None:
    reader = counting(write_tokens, 500)
    whole = [SampleStream([(reader, 1.0)], 10, VOCAB, seed=7)[index].tolist() for index in range(200)]
    resumed = SampleStream([(reader, 1.0)], 10, VOCAB, seed=7)
    assert [resumed[index].tolist() for index in range(120, 200)] == whole[120:]
    other = SampleStream([(reader, 1.0)], 10, VOCAB, seed=8)
    assert [other[index].tolist() for index in range(200)] != whole


def test_blend_draws_in_proportion_and_in_each_ones_order(write_tokens: WriteTokens) -> None:
    first = write_tokens("first", VOCAB, [range(0, 1000)])
    second = write_tokens("second", VOCAB, [range(2000, 2500)])
    stream = SampleStream([(first, 3.0), (second, 1.0)], 10, VOCAB, seed=3, shuffle=False)
    samples = [stream[index] for index in range(80)]
    assert Counter(bool(sample[0] >= 2000) for sample in samples) == {False: 60, True: 20}
    assert [int(sample[0]) for sample in samples if sample[0] < 2000] == list(range(0, 600, 10))
    assert [int(sample[0]) for sample in samples if sample[0] >= 2000] == list(range(2000, 2200, 10))
    # The first dataset's 99 windows are used up at sample 132, before the second's 49 at 198.
    seen = [tuple(stream[index].tolist()) for index in range(stream.num_samples + 1)]
    assert 130 <= stream.num_samples <= 134
    assert len(set(seen)) == stream.num_samples == len(seen) - 1
    assert SampleStream([(first, 1.0), (second, 1.0)], 10, VOCAB, seed=3, shuffle=False).num_samples == 2 * 49 + 1


@pytest.mark.parametrize("weights", [[1 / 3, 2 / 3], [1.0] * 7])
def test_a_long_blend_ends_where_its_weights_say(weights: list[float]) -> None:
    """Each dataset is just large enough for its share of a million samples."""
    samples, total = 1_000_000, sum(weights)
    num_windows = [int(samples * weight / total) for weight in weights]
    readers = [IndexedTokens(str(n), np.zeros(n + 1, np.uint16), np.array([n]), np.array([0])) for n in num_windows]
    stream = SampleStream(list(zip(readers, weights, strict=True)), 1, VOCAB, seed=0, shuffle=False)
    assert abs(stream.num_samples - samples) <= total / min(weights)


def test_weights_change_at_a_sample_and_each_dataset_goes_on(write_tokens: WriteTokens) -> None:
    """Whatever is asked for first; and a dataset that is added later changes nothing before."""
    ranges = [range(0, 1000), range(1000, 2000), range(2000, 2400)]
    readers = [write_tokens(str(each.start), VOCAB, [each]) for each in ranges]
    later = [(40, [1.0, 1.0, 0.0]), (80, [0.0, 1.0, 1.0])]
    weighted = list(zip(readers, [3.0, 1.0, 0.0], strict=True))
    stream = SampleStream(weighted, 10, VOCAB, 3, shuffle=False, weight_schedule=later)
    firsts = [int(stream[index][0]) for index in range(120)]
    drawn = [first // 1000 for first in firsts]
    counts = [[drawn[begin : begin + 40].count(which) for which in range(3)] for begin in (0, 40, 80)]
    assert counts == [[30, 10, 0], [20, 20, 0], [0, 20, 20]]
    for which in range(3):
        own = [first for first in firsts if first // 1000 == which]
        assert own == list(range(1000 * which, 1000 * which + 10 * len(own), 10))
    again = SampleStream(weighted, 10, VOCAB, 3, shuffle=False, weight_schedule=later)
    assert [int(again[index][0]) for index in (119, 0, 79, 80, 41, 40, 39)] == [
        firsts[index] for index in (119, 0, 79, 80, 41, 40, 39)
    ]
    before = SampleStream(weighted[:2], 10, VOCAB, 3, shuffle=False, weight_schedule=[(40, [1.0, 1.0])])
    assert [int(before[index][0]) for index in range(80)] == firsts[:80]
    # the third one's 39 windows are used up first, 79 samples into the last stage
    assert abs(stream.num_samples - (80 + 78)) <= 1
    seen = [tuple(stream[index].tolist()) for index in range(stream.num_samples + 1)]
    assert len(set(seen)) == stream.num_samples
    first_to_end = SampleStream(
        weighted, 10, VOCAB, 3, shuffle=False, weight_schedule=[(40, [0.0, 0.0, 1.0]), (60, [3.0, 1.0, 0.0])]
    )
    assert abs(first_to_end.num_samples - (20 + 99 * 4 / 3)) <= 2
    with pytest.raises(UserError, match="remove the dataset"):
        SampleStream(weighted, 10, VOCAB, 3, weight_schedule=[(40, [1.0, 1.0, 0.0])])


def test_equal_datasets_are_shuffled_apart(write_tokens: WriteTokens) -> None:
    pair = [(counting(write_tokens, 500, name), 1.0) for name in ("a", "b")]
    stream = SampleStream(pair, 10, VOCAB, seed=3)
    assert [int(stream[i][0]) // 10 for i in range(0, 40, 2)] != [int(stream[i][0]) // 10 for i in range(1, 41, 2)]


def test_too_short(write_tokens: WriteTokens) -> None:
    reader = counting(write_tokens, 10)
    assert SampleStream([(reader, 1.0)], 9, VOCAB, seed=0)[3].tolist() == list(range(10))
    with pytest.raises(UserError, match=r"count has 10 tokens.*model.sequence = 10 takes 11.*at most 9"):
        SampleStream([(reader, 1.0)], 10, VOCAB, seed=0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 0.00001])
def test_useless_weights(write_tokens: WriteTokens, weight: float) -> None:
    good, bad = counting(write_tokens, 50), counting(write_tokens, 50, "small")
    with pytest.raises(UserError, match="weight"):
        SampleStream([(good, 1.0), (bad, weight)], 8, VOCAB, seed=0)


@pytest.mark.parametrize("scanned", [1 << 24, 1])
def test_foreign_ids_are_told(write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch, scanned: int) -> None:
    """At once in the part that is scanned, otherwise with the first sample that holds one."""
    monkeypatch.setattr(module, "_SCANNED", scanned)
    reader = counting(write_tokens, 50)
    if scanned > 1:
        with pytest.raises(UserError, match=r"count contains the id 49, but model\.vocab = 40"):
            SampleStream([(reader, 1.0)], 8, 40, seed=0)
    else:
        stream = SampleStream([(reader, 1.0)], 8, 40, seed=0, shuffle=False)
        assert stream[3].max() == 32
        with pytest.raises(UserError, match=r"count contains the id 40, but model\.vocab = 40"):
            stream[4]


def test_negative_ids_are_told(write_tokens: WriteTokens) -> None:
    reader = IndexedTokens("negative", np.array([3, -1, 5], np.int32), np.array([3], np.int32), np.array([0, 1]))
    with pytest.raises(UserError, match="negative contains the id -1"):
        SampleStream([(reader, 1.0)], 2, 40, seed=0)


@given(vocab=st.integers(5, 300), seed=st.integers(0, 100), index=st.integers(0, 10**9))
def test_synthetic_tokens(vocab: int, seed: int, index: int) -> None:
    stream = SyntheticStream(sequence=400, vocab=vocab, seed=seed, avoid={0, 3})
    sample = stream[index]
    assert sample.shape == (401,)
    assert sample.dtype == np.int64
    assert set(sample.tolist()) <= set(range(vocab)) - {0, 3}
    assert (vocab - 1) in SyntheticStream(10_000, vocab, seed, avoid={0, 3})[index]
    assert (sample == SyntheticStream(400, vocab, seed, avoid={0, 3})[index]).all()
    assert (sample != stream[index + 1]).any()
    assert (sample != SyntheticStream(400, vocab, seed + 1, avoid={0, 3})[index]).any()
