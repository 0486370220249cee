"""How a global batch is dealt to data-parallel ranks, and reading ahead."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pangu.config.data import PackingConfig
from pangu.data import loader as loader_module
from pangu.data.loader import Loader, LoaderStage, step_samples
from pangu.data.stream import Stream
from pangu.topology.copy_stream import CopyStream

PACKING = PackingConfig(eod=None, pad=None, reset_mask=False, reset_positions=False)


class Recorded(Stream):
    """Samples that hold their own index; notes what is read, and fails at one of them."""

    num_samples = None

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.read: Counter[int] = Counter()

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        self.read[index] += 1
        return np.full(5, index)


@given(step=st.integers(0, 1000), micro=st.integers(1, 4), ranks=st.integers(1, 5), more=st.integers(0, 12))
def test_ranks_share_the_global_batch(step: int, micro: int, ranks: int, more: int) -> None:
    size, accumulation = micro * (ranks + more), -(-(ranks + more) // ranks)
    dealt = [step_samples(step * size, size, micro, rank, ranks) for rank in range(ranks)]
    assert all(accumulation - 1 <= len(micro_batches) <= accumulation for micro_batches in dealt)
    rounds = zip_longest(*dealt, fillvalue=range(0))
    assert [index for one in rounds for part in one for index in part] == list(range(step * size, (step + 1) * size))


@given(step=st.integers(0, 1000), micro=st.integers(1, 4), shares=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_ranks_take_turns_until_each_has_its_share(step: int, micro: int, shares: list[int]) -> None:
    size = micro * sum(shares)
    dealt = [step_samples(step * size, size, micro, rank, len(shares), shares) for rank in range(len(shares))]
    assert list(map(len, dealt)) == shares
    rounds = zip_longest(*dealt, fillvalue=range(0))
    assert [index for one in rounds for part in one for index in part] == list(range(step * size, (step + 1) * size))


def test_a_rank_with_fewer_micro_batches_repeats_one_that_does_not_count() -> None:
    stream = Recorded()
    with Loader(stream, PACKING, 8, 1, rank=2, size=3) as loader:
        *counted, repeated = loader.micro_batches(0)
    assert [batch.samples for batch in counted] == [(2,), (5,)]
    assert repeated.samples == (5,)
    assert repeated.tokens.equal(counted[-1].tokens)
    assert not repeated.weights.any()
    assert all(batch.weights.any() for batch in counted)
    assert not stream.read[7], "it is of another rank"


def test_a_rank_with_a_smaller_share_repeats_none() -> None:
    with Loader(Recorded(), PACKING, 8, 1, rank=2, size=3, stage_at=lambda _: LoaderStage(8, 1, (3, 4, 1))) as loader:
        assert [batch.samples for batch in loader.micro_batches(0)] == [(2,)]


def test_formula() -> None:
    """Micro-batch a of rank r holds rows [(a D + r) b, (a D + r + 1) b) of the global batch."""
    assert step_samples(24, 12, 2, rank=1, size=3) == [range(26, 28), range(32, 34)]


def test_what_does_not_divide() -> None:
    for micro, ranks in ((5, 2), (2, 7)):
        with pytest.raises(ValueError, match=f"12 cannot be divided among {ranks} ranks in micro-batches of {micro}"):
            step_samples(0, 12, micro, 0, ranks)


def test_batches_hold_their_samples() -> None:
    with Loader(Recorded(), PACKING, 12, 2, rank=1, size=3) as loader:
        for step in (0, 1, 7, 7, 3):  # in order, a jump, again, back
            batches = loader.micro_batches(12 * step)
            assert [batch.samples for batch in batches] == [
                tuple(indices) for indices in step_samples(12 * step, 12, 2, 1, 3)
            ]
            assert [batch.tokens[:, 0].tolist() for batch in batches] == [list(batch.samples) for batch in batches]


def test_the_next_step_is_read_once_and_ahead() -> None:
    stream = Recorded()
    with Loader(stream, PACKING, 4, 4, 0, 1) as loader:
        for step in range(3):
            loader.micro_batches(4 * step)
    # Closing waits for what is under way, or drops what has not begun.
    assert set(range(12)) <= set(stream.read) <= set(range(16))
    assert set(stream.read.values()) == {1}


def test_reading_ahead_does_not_wait_to_be_asked() -> None:
    reached = threading.Event()

    class Signalling(Recorded):
        def __getitem__(self, index: int) -> NDArray[np.int64]:
            if index == 5:
                reached.set()
            return super().__getitem__(index)

    with Loader(Signalling(), PACKING, 4, 4, 0, 1) as loader:
        loader.micro_batches(0)
        assert reached.wait(timeout=300)


def test_a_slow_disk_is_hidden_until_a_step_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's: to read the samples of a step takes 3 s, beside a computation or while it waits."""
    clock, asked = 0.0, 0
    may_be_read = {first: threading.Event() for first in (0, 4, 8, 12)}

    class Slow(Recorded):
        def __getitem__(self, index: int) -> NDArray[np.int64]:
            nonlocal clock
            if index in may_be_read:
                assert may_be_read[index].wait(timeout=300)
                clock += 3
            return super().__getitem__(index)

    def now() -> float:
        time = clock
        may_be_read[asked].set()
        return time

    monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=now))
    with Loader(Slow(), PACKING, 4, 4, 0, 1) as loader:
        for asked, beside, waited in ((0, False, 3), (4, True, 0), (8, False, 3)):
            if beside:
                may_be_read[asked].set()
                assert loader._ahead is not None
                loader._ahead[1].result()
            loader.micro_batches(asked)
            assert loader.waited_s == waited
        may_be_read[12].set()


def test_errors_come_with_their_step() -> None:
    with Loader(Recorded(broken=9), PACKING, 4, 2, 0, 2) as loader:
        assert len(loader.micro_batches(4)) == 1  # samples 4 and 5; sample 9 is read ahead
        for _ in range(2):
            with pytest.raises(ValueError, match="sample 9 is broken"):
                loader.micro_batches(8)
        assert loader.micro_batches(12)[0].samples == (12, 13)


def test_close_ends_the_thread() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    loader = Loader(Recorded(), PACKING, 4, 2, 0, 1)
    loader.micro_batches(0)
    assert {thread.ident for thread in threading.enumerate()} != before
    loader.close()
    assert {thread.ident for thread in threading.enumerate()} <= before


def test_no_copy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches that nobody asks for: what computes next may be given their memory."""
    queued: list[int] = []
    waited: list[int] = []

    def record(_: CopyStream) -> int:
        queued.append(len(queued))
        return queued[-1]

    monkeypatch.setattr(CopyStream, "record", record)
    monkeypatch.setattr(CopyStream, "wait", staticmethod(waited.append))
    with Loader(Recorded(broken=20), PACKING, 4, 2, 0, 1) as loader:
        for consumed in (0, 4, 12, 0, 16, 0):  # in order, a jump, back; what follows 16 cannot be read
            loader.micro_batches(consumed)
        loader.micro_batches(4)
    assert waited == queued


def test_the_position_is_that_after_the_step() -> None:
    """Not that of the step which is read ahead meanwhile."""

    class Placed(Recorded):
        at = 0

        @property
        def position(self) -> dict[str, int]:
            return {"samples": self.at}

        def __getitem__(self, index: int) -> NDArray[np.int64]:
            self.at = index + 1
            return super().__getitem__(index)

    with Loader(Placed(), PACKING, 4, 2, 0, 1) as loader:
        assert loader.position is None
        for step in (0, 1, 2, 1):
            loader.micro_batches(4 * step)
            assert loader._ahead is not None
            loader._ahead[1].result()
            assert loader.position == {"samples": 4 * step + 4}


class Counting(Stream):
    """Sample i holds the tokens 8 i to 8 i + 8, the last of which begins sample i + 1; notes what is read."""

    num_samples = None

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        self.read.append(index)
        return np.arange(8 * index, 8 * index + 9)


@pytest.mark.parametrize("size", [1, 2])
def test_stages_read_every_token_once_and_in_order(size: int) -> None:
    """Four sequences of 2 tokens, then four of 4, then two and four of 8, whatever the number of ranks."""
    stages = [LoaderStage(4, 4), LoaderStage(4, 2), LoaderStage(2), LoaderStage(4)]
    tokens: dict[tuple[int, int], list[int]] = {}
    for rank in range(size):
        stream, consumed = Counting(), 0
        with Loader(stream, PACKING, 4, 1, rank, size, stage_at=lambda step: stages[min(step, 3)]) as loader:
            for step, stage in enumerate(stages):
                for batch in loader.micro_batches(consumed, step):
                    assert torch.equal(batch.labels, batch.tokens + 1)
                    tokens[step, batch.samples[0]] = batch.tokens[0].tolist()
                consumed += stage.global_size // stage.parts
        assert consumed == 9
        assert stream.read.count(0) == 1  # not once per sequence
    ordered = [token for place in sorted(tokens) for token in tokens[place]]
    assert ordered == list(range(8 * 9))
