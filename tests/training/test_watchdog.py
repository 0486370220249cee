"""A run that hangs says who is stuck where, before it is ended. Ranks are threads, the collective is an event, and time
is simulated."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname
from threading import Event, Thread
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from pangu.collectives import agreement
from pangu.collectives.agreement import answer_of_store, report_unresponsive_ranks
from pangu.common.errors import SILENCE_SECONDS, LostError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import watchdog
from pangu.training.watchdog import Place, Watchdog
from tests.simulated_time import PATIENCE_SECONDS, SimulatedTime

TIMEOUT = 2.0


def mesh(rank: int, world: int, store: dist.Store) -> Mesh:
    return Mesh(Layout(data=world), rank, torch.device("cpu"), timeout_s=TIMEOUT, store=store)


def all_reduce_that_never_ends(released: Event) -> None:
    released.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    time = SimulatedTime()
    monkeypatch.setattr(watchdog, "time", time)
    monkeypatch.setattr(watchdog, "Event", time.event)
    monkeypatch.setattr(watchdog, "STORE_SECONDS", PATIENCE_SECONDS)  # the store answers when the machine lets it
    return time


def test_who_is_stuck_where_is_said_with_stacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: SimulatedTime
) -> None:
    """Rank 2 reads data for ever, rank 3 is gone after a while, and ten others wait in a collective of the step. Who
    has waited longest speaks, and nobody else, before the time is over."""
    store, world, released = dist.HashStore(), 12, Event()

    def place(rank: int) -> Place:
        late = rank != 2 and clock.monotonic() > 0.5
        return Place(6, "step 7, adding up gradients" if late else "step 7, counting target tokens")

    Thread(target=all_reduce_that_never_ends, args=(released,)).start()
    watchdogs = [Watchdog(mesh(rank, world, store), tmp_path, partial(place, rank)) for rank in range(world)]
    with ExitStack() as stack:
        stack.callback(released.set)
        for one in watchdogs:
            stack.enter_context(one)
        clock.sleep(0.85)
        watchdogs[3].__exit__(None, None, None)
        clock.sleep(0.9 * TIMEOUT - 0.8)
        said = capfd.readouterr().err
        clock.sleep(TIMEOUT)
        assert capfd.readouterr().err == ""
    first, *lines = said.strip().splitlines()
    assert first.startswith(f"rank 2: no progress for 1.4 s (parallel.timeout_s = 2); stacks are in {tmp_path}/stacks")
    words = [line.rpartition(", for ")[0].strip() for line in lines]
    assert words == [
        "rank 3: not responding, stopped or exited",
        "rank 2: step 7, counting target tokens",
        "rank 0, 1, 4, 5, 6, 7, 8, 9 and 2 more: step 7, adding up gradients",
    ]
    stacks = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert stacks.startswith("rank 0: step 7, adding up gradients\n")
    assert "all_reduce_that_never_ends" in stacks
    assert (tmp_path / "stacks" / f"where-{gethostname()}.txt").read_text().strip() == said.strip()


@pytest.mark.parametrize(
    ("error", "aborts"),
    [
        (ValueError("a fault of rank 0"), True),
        (None, False),
        # those who wait for a rank that is gone run into the same timeout, and say who it is
        (LostError("rank 2 did not respond"), False),
        (dist.DistBackendError("watchdog caught collective operation timeout"), False),
    ],
    ids=repr,
)
def test_where_a_rank_fails_the_others_abort_what_they_wait_in_and_name_it(
    error: BaseException | None, aborts: bool, tmp_path: Path, clock: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, aborted = dist.HashStore(), []
    monkeypatch.setattr(watchdog, "abort_groups", lambda: aborted.append(clock.monotonic()))
    failing, waiting = (Watchdog(mesh(rank, 2, store), tmp_path, lambda: Place(6, "step 7")) for rank in (0, 1))
    with waiting:
        with suppress(ValueError, LostError, RuntimeError), failing:
            clock.sleep(0.25)
            if error is not None:
                raise error
        clock.sleep(0.25 * TIMEOUT)
        assert bool(aborted) == aborts
        assert all(when <= 0.25 + TIMEOUT / 20 for when in aborted)
    waits: list[float] = []
    with (
        pytest.raises(LostError, match="rank 0 did not respond") if aborts else suppress(LostError),
        patch.object(agreement, "time", SimpleNamespace(sleep=waits.append)),
        report_unresponsive_ranks(mesh(1, 2, store), lambda: "step 7"),
    ):
        raise dist.DistBackendError("NCCL communicator was aborted on rank 1")
    assert waits == [SILENCE_SECONDS]  # the one that failed ends first, and the launcher has its message and status


@pytest.mark.parametrize("folder", ["removed", "on a full disk"])
def test_the_first_process_is_stopped_and_nothing_can_be_written(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: SimulatedTime
) -> None:
    """Another one says it, and the stacks stand where a log would."""
    if folder == "on a full disk":
        (tmp_path / "run" / "stacks").mkdir(parents=True)
        for name in ("rank-1.txt", f"where-{gethostname()}.txt"):
            (tmp_path / "run" / "stacks" / name).symlink_to("/dev/full")
    store = dist.HashStore()
    stopped, other = (Watchdog(mesh(rank, 2, store), tmp_path / "run", lambda: Place(6, "step 7")) for rank in (0, 1))
    with other:
        with stopped:
            clock.sleep(0.25)
        clock.sleep(TIMEOUT)
        said = capfd.readouterr().err
    assert "rank 1: step 7 (cannot write" in said
    assert "in test_the_first_process_is_stopped_and_nothing_can_be_written\n" in said
    # its last message came after 0.2 s; after 0.7 * 2 s rank 1 looks twice, with 0.3 s between
    assert "rank 0: not responding, stopped or exited, for 1.5 s\n" in said


def test_the_first_process_is_stopped_and_serves_the_store(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: SimulatedTime
) -> None:
    """It takes what is sent, and answers no question."""
    monkeypatch.setattr(watchdog, "answer_of_store", lambda limit_s, action: answer_of_store(0.01, action))
    released = Event()
    monkeypatch.setattr(dist.PrefixStore, "add", lambda *_: released.wait(), raising=False)
    monkeypatch.setattr(watchdog.socket, "gethostname", lambda: "node-b")
    store = dist.HashStore()
    with ExitStack() as stack:
        stack.callback(released.set)
        for rank in (1, 20):  # a node without the first ranks leaves the file too
            folder = tmp_path / str(rank)
            folder.mkdir()
            one = replace(mesh(rank, 21, store), store_rank=0)
            stack.enter_context(Watchdog(one, folder, lambda: Place(6, "step 7")))
        clock.sleep(TIMEOUT)
    for rank in (1, 20):
        text = (tmp_path / str(rank) / "stacks" / "where-node-b.txt").read_text()
        assert text == f"rank {rank}: step 7: no progress, and rank 0 does not respond\n"
    assert capfd.readouterr().err.strip() == ("rank 1: step 7: no progress, and rank 0 does not respond")


def test_a_run_is_watched_before_its_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: SimulatedTime
) -> None:
    """Rank 1 was stopped before it was heard of."""
    with Watchdog(mesh(0, 2, dist.HashStore()), tmp_path) as one:
        clock.sleep(TIMEOUT)
        said = capfd.readouterr().err
        assert "rank 0: before the first step, for 1.4 s" in said
        assert "rank 1: not responding, stopped or exited" in said
        one.follow(Mock(step=3, doing="updating weights", runner=Mock(began=0.0)))
        clock.sleep(TIMEOUT)
        assert "rank 0: step 4, updating weights, for 1." in capfd.readouterr().err


def test_a_second_wait_in_a_step_is_said_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: SimulatedTime
) -> None:
    """As of a checkpoint that took long before the step behind it hangs."""
    places = [Place(6, "step 7, saving")]
    with Watchdog(mesh(0, 2, dist.HashStore()), tmp_path, lambda: places[-1]):
        clock.sleep(TIMEOUT)
        assert "rank 0: step 7, saving, for 1." in capfd.readouterr().err
        places.append(Place(6, "step 7, forward and backward"))
        clock.sleep(TIMEOUT)
        assert "rank 0: step 7, forward and backward, for 1." in capfd.readouterr().err


def test_a_run_that_gets_on_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], clock: SimulatedTime
) -> None:
    with (
        patch.object(watchdog, "PATIENCE", 0.25),
        Watchdog(mesh(0, 2, dist.HashStore()), tmp_path, lambda: Place(0, "step 1", clock.monotonic() // 0.3)),
    ):
        clock.sleep(10 * TIMEOUT)
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


class _Slow(dist.Store):
    """A store that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def clone(self) -> _Slow:
        return self

    def set(self, key: str, value: str) -> None:
        self.asked.set()
        time.sleep(0.3)


def test_no_thread_is_in_the_store_when_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends with an abort if one is."""
    monkeypatch.setattr(watchdog, "STORE_SECONDS", PATIENCE_SECONDS)
    store = _Slow()
    with Watchdog(mesh(0, 2, store), tmp_path, lambda: Place(0, "step 1")):
        store.asked.wait()
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
