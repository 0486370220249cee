"""Processes meet through the store: what all hear, who is named, and what is left behind. Ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pangu.collectives import agreement
from pangu.collectives.agreement import StuckError, agree, agree_on_long_work, report_unresponsive_ranks
from pangu.common.errors import LostError, UserError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.pace import at_some_pace

WORLD = 64


def on_ranks(function: Callable[[Mesh], Any], world: int, timeout_s: float, store: dist.Store) -> list[Any]:
    """What `function` returns, or the UserError that it raises, on each of as many threads."""

    def outcome(rank: int) -> Any:
        try:
            return function(Mesh(Layout(data=world), rank, torch.device("cpu"), timeout_s=timeout_s, store=store))
        except UserError as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(outcome, range(world)))


def test_all_hear_the_results_of_all_and_no_key_is_left() -> None:
    store = dist.HashStore()

    def twice(mesh: Mesh) -> Any:
        return agree(mesh, lambda: mesh.rank, runs_here=mesh.rank % 2 == 1), agree(
            mesh, lambda: 7, runs_here=mesh.is_first
        )

    odd = [rank if rank % 2 else None for rank in range(WORLD)]
    assert on_ranks(twice, WORLD, 20.0, store) == [(odd, [7] + [None] * (WORLD - 1))] * WORLD
    assert store.num_keys() == WORLD  # the number of rounds of each


def test_the_error_of_one_is_that_of_all() -> None:
    def fail() -> None:
        raise UserError("no file")

    outcomes = on_ranks(lambda mesh: agree(mesh, fail, runs_here=mesh.rank == 40), WORLD, 20.0, dist.HashStore())
    assert [str(error) for error in outcomes] == ["no file"] * WORLD


@at_some_pace
def test_work_that_makes_progress_may_take_long(pace: float) -> None:
    """One rank takes longer than the others would wait for it; meanwhile the foreground meets as well."""

    def action(on_progress: Callable[[], None]) -> int:
        for _ in range(8):
            time.sleep(0.25 * pace)
            on_progress()
        return 7

    def both(mesh: Mesh) -> Any:
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(agree_on_long_work, mesh.background(), "working", action, runs_here=mesh.rank == 1)
            return agree(mesh, work.done, runs_here=True), work.result()

    (done, results), *others = on_ranks(both, 4, pace, dist.HashStore())
    assert done == [False] * 4  # this meeting did not wait for the work
    assert results == [None, 7, None, None]
    assert [rest for _, rest in others] == [[]] * 3


@at_some_pace
def test_a_rank_whose_work_hangs_is_named_on_all(pace: float) -> None:
    released = Event()

    def action(_: Callable[[], None]) -> None:
        released.wait(300.0)

    outcomes = on_ranks(
        lambda mesh: agree_on_long_work(mesh, "writing FILE", action, runs_here=mesh.rank == 5),
        8,
        pace,
        dist.HashStore(),
    )
    released.set()
    assert {(type(error), str(error)) for error in outcomes} == {
        (
            StuckError,
            f"rank 5: writing FILE made no progress for more than {pace:g} s (parallel.timeout_s); check the disk and "
            "the network there, or raise parallel.timeout_s",
        )
    }


@at_some_pace
def test_who_works_hears_of_its_own_progress_and_who_waits_of_all(pace: float) -> None:
    heard: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(3)}

    def work(mesh: Mesh) -> None:
        def action(on_progress: Callable[[], None]) -> None:
            for _ in range(6):
                time.sleep(0.25 * pace)
                if mesh.rank == 1:
                    on_progress()

        agree_on_long_work(
            mesh, "working", action, runs_here=mesh.rank < 2, watch=lambda *said: heard[mesh.rank].append(said)
        )

    on_ranks(work, 3, 5.0 * pace, dist.HashStore())
    assert {progress for words, progress in heard[0] if words == "working"} == {0}
    assert max(progress for words, progress in heard[1] if words == "working") > 0
    assert heard[2][-1] == ("waiting for other ranks: working", 6)


@at_some_pace
def test_work_that_nobody_waits_for_ends_and_cleans_up(pace: float) -> None:
    """Rank 0 hangs, until it is told to leave; that ends what rank 1 does well."""
    released = Event()
    ended = [Event(), Event()]

    def work(mesh: Mesh) -> bool:
        def hang(on_progress: Callable[[], None]) -> None:
            released.wait(300.0)
            ended[0].set()

        def get_on(on_progress: Callable[[], None]) -> None:
            try:
                for _ in range(400):
                    time.sleep(0.05 * pace)
                    on_progress()
            finally:
                ended[1].set()

        action, leave = (get_on, lambda: None) if mesh.rank else (hang, released.set)
        try:
            agree_on_long_work(mesh, "working", action, runs_here=True, leave=leave)
        except StuckError:
            return ended[mesh.rank].is_set()
        return False

    assert on_ranks(work, 2, pace, dist.HashStore()) == [True, True]


@pytest.mark.parametrize("absent", [0, 5])
@at_some_pace
def test_ranks_that_do_not_come_are_named(absent: int, pace: float) -> None:
    def come(mesh: Mesh) -> None:
        with report_unresponsive_ranks(mesh, lambda: "saving"):
            if mesh.rank not in (absent, 6):
                agree(mesh, lambda: None, runs_here=True)

    with patch.multiple(agreement, SILENCE_SECONDS=0.2 * pace):
        outcomes = on_ranks(come, 8, 0.5 * pace, dist.HashStore())
    for rank, error in enumerate(outcomes):
        if rank in (absent, 6):
            assert error is None
        else:
            assert isinstance(error, LostError)
            assert str(error).startswith(
                f"rank {rank}, saving: rank {absent}, 6 did not respond within parallel.timeout_s"
            )


class _Stopped(dist.Store):
    """A store whose process is stopped: it does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = Event()

    def add(self, key: str, amount: int) -> int:
        self.ended.wait(300.0)
        return 0

    def set(self, key: str, value: str) -> None:
        self.ended.wait(300.0)


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    store = _Stopped()
    mesh = Mesh(Layout(data=2), 1, torch.device("cpu"), timeout_s=0.2, store=store, store_rank=0)
    with (
        patch.multiple(agreement, SILENCE_SECONDS=0.1, STORE_SECONDS=0.1),
        pytest.raises(LostError, match=r"^rank 1, saving: rank 0 did not respond .*the store does not respond"),
        report_unresponsive_ranks(mesh, lambda: "saving"),
    ):
        agree(mesh, lambda: None, runs_here=True)
    store.ended.set()
