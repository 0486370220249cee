"""Agreement between processes through the run's store: an error on one is raised on all, so that none waits forever.

No collective is involved: host work (reading, hashing, writing) may be slow without blocking the device, and a
background thread may agree with its peers as well.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from pangu.common.errors import SILENCE_SECONDS, STORE_SECONDS, LostError, UserError
from pangu.topology.mesh import BACKGROUND, Mesh, is_silence

T = TypeVar("T")
A = TypeVar("A")

FAILED = "failed"
"""Key of a background mesh's store: a rank that has failed, so that its peers need not wait for it."""
INTERVAL_SECONDS = 10.0
"""Heartbeat interval of processes at long work, in seconds; less if `parallel.timeout_s` is short."""
LEAVE_SECONDS = 2.0
"""Time for abandoned work to clean up, in seconds."""


class StuckError(UserError):
    """Error raised on all processes when the work of one makes no progress."""


@contextmanager
def report_unresponsive_ranks(mesh: Mesh, where: Callable[[], str]) -> Iterator[None]:
    """Turn a collective that times out in the block into a `LostError` with `where()` and the silent ranks if known."""
    try:
        yield
    except RuntimeError as error:
        if not is_silence(error):
            raise
        place = where()
        try:
            silent = answer_of_store(SILENCE_SECONDS + STORE_SECONDS, partial(unresponsive_ranks, mesh))
        except RuntimeError:
            silent = [] if mesh.store_rank in (None, mesh.rank) else [mesh.store_rank]
        others = mesh.named(silent) if silent else "another process"
        raise LostError(
            f"{mesh.name}, {place}: {others} did not respond within parallel.timeout_s, or exited; check "
            f"the output there for the cause ({error})"
        ) from error


def agree(mesh: Mesh, action: Callable[[], T], *, runs_here: bool) -> list[T | None]:
    """Run `action` where `runs_here` is true, and return the results of all ranks in order once all have finished.

    The result is None where the action did not run. A `UserError` on any rank is raised on every rank; `RuntimeError`
    (see `is_silence`) if a rank does not answer within `parallel.timeout_s`.
    """
    return _results(mesh, outcome(action) if runs_here else (None, None))


def agree_on_first(mesh: Mesh, action: Callable[[], T]) -> T:
    """Run `action` on the first rank like `agree`, and return its result on all."""
    result: T = agree(mesh, action, runs_here=mesh.is_first)[0]  # type: ignore[assignment]  # None where T allows it
    return result


def _results(mesh: Mesh, own: tuple[T | None, str | None], everywhere: bool = True) -> list[T | None]:
    """Return the results of all ranks, or an empty list on all but rank 0; raise the first error as `UserError`."""
    results: list[T | None] = []

    def answer(outcomes: list[tuple[T | None, str | None]]) -> tuple[str | None, list[T | None]]:
        results.extend(result for result, _ in outcomes)
        return first_message(outcomes), results if everywhere else []

    message, shared = answer_all(mesh, own, answer)
    if message is not None:
        raise UserError(message)
    return results or shared


def outcome(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `action` and None, or None and the message of its `UserError`."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)


def first_message(outcomes: list[tuple[T | None, str | None]]) -> str | None:
    """Return the error message of the first rank that has one, or None."""
    return next((message for _, message in outcomes if message is not None), None)


def answer_all(mesh: Mesh, value: T, answer: Callable[[list[T]], A]) -> A:
    """Pass the values of all processes, in rank order, to `answer` on rank 0, and return its result on all."""
    # Raises RuntimeError (see `is_silence`) if a process does not arrive within `parallel.timeout_s`.
    if mesh.layout.world == 1:
        return answer([value])
    return answer_of_store(mesh.timeout_s + STORE_SECONDS, partial(_answer_all, mesh, value, answer))


def _answer_all(mesh: Mesh, value: T, answer: Callable[[list[T]], A]) -> A:
    """Pass the values of all processes to `answer` on rank 0, and return its result on all.

    Each process sets a key; rank 0 reads them all and sets one answer, for which the others wait. Rank 0 returns only
    when all have read it, since the store may end with that process. A process sends six queries, and leaves no key but
    its number of meetings. Raise `DistStoreError` if one is late.
    """
    store, rank, world = mesh.store, mesh.rank, mesh.layout.world
    assert store is not None
    limit = timedelta(seconds=mesh.timeout_s)
    meeting = store.add(f"meetings-{rank}", 1)
    keys = [f"meeting-{meeting}-{rank}" for rank in range(world)]
    answered, count, read = (f"meeting-{meeting}-{name}" for name in ("answer", "count", "read"))
    if rank == 0:
        store.wait(keys[1:], limit)
        result = answer([value, *map(pickle.loads, store.multi_get(keys[1:]))])
        store.set(answered, pickle.dumps(result))  # type: ignore[arg-type]  # typed as str, but bytes work
        store.wait([read], limit)
        for key in (answered, count, read):
            store.delete_key(key)
        return result
    store.set(keys[rank], pickle.dumps(value))  # type: ignore[arg-type]
    store.wait([answered], limit)
    result = pickle.loads(store.get(answered))
    store.delete_key(keys[rank])
    if store.add(count, 1) == world - 1:
        store.set(read, "")
    return result


def unresponsive_ranks(mesh: Mesh) -> list[int]:
    """Return the rank that says it has failed, or those that do not report the same timeout soon after this one."""
    if mesh.store is None:
        return []
    failed = f"{BACKGROUND}/{FAILED}"
    failing = [int(mesh.store.get(failed))] if mesh.store.check([failed]) else []
    mesh.store.set(f"misses-{mesh.rank}", "")
    time.sleep(SILENCE_SECONDS)  # a rank that has failed ends first: the launcher passes on its message and its status
    if failing:
        return failing
    silent = absent(mesh.store, [f"misses-{rank}" for rank in range(mesh.layout.world)])
    return [int(key.removeprefix("misses-")) for key in silent]


def absent(store: dist.Store, keys: list[str]) -> list[str]:
    """Return the keys that are not set, by bisection: few queries if most are set."""
    if store.check(keys):
        return []
    half = len(keys) // 2
    return keys if half == 0 else absent(store, keys[:half]) + absent(store, keys[half:])


def answer_of_store(limit_s: float, action: Callable[[], T]) -> T:
    """Return the result of an action that queries the store; raise `DistStoreError` after `limit_s`."""
    # Run it in a thread: if the process that serves the store is stopped, a query blocks forever.
    future: Future[T] = Future()
    thread = Thread(target=complete, args=(future, action), name="store", daemon=True)
    thread.start()
    try:
        result = future.result(limit_s)
        thread.join()  # Python aborts at exit if a thread is inside the store
        return result
    except TimeoutError as error:
        raise dist.DistStoreError("the store does not respond") from error


def complete(future: Future[T], action: Callable[[], T]) -> None:
    """Run `action` and set its result or error on `future`."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def in_thread(name: str, action: Callable[[], T], daemon: bool = True) -> Future[T]:
    """Run `action` in a thread and return its future result; the end of Python waits for it unless it is a `daemon`."""
    future: Future[T] = Future()
    Thread(target=complete, args=(future, action), name=name, daemon=daemon).start()
    return future


def agree_on_long_work(
    mesh: Mesh,
    doing: str,
    action: Callable[[Callable[[], None]], T],
    *,
    runs_here: bool,
    watch: Callable[[str, int], None] = lambda words, progress: None,
    leave: Callable[[], None] = lambda: None,
) -> list[T | None]:
    """Run work like `agree`, limiting the time without progress by `parallel.timeout_s` rather than the total time.

    `action` runs in a thread, so that processes can exchange heartbeats, and gets a callback to call whenever it has
    made progress; `doing` names the work in messages, e.g. "writing". `watch` gets a description and a progress count
    every few seconds, that of all ranks if this one only waits. The results of all ranks, which may be large, are
    returned on rank 0 only, an empty list elsewhere. Raise `StuckError` on all processes, with the ranks without
    progress.

    If this process abandons the action, after an error elsewhere or Ctrl-C, the callback raises `CancelledError` in it,
    and `leave` is called to end what it waits for.
    """
    progress, progress_s, is_left = 0, time.monotonic(), False

    def on_progress() -> None:
        nonlocal progress, progress_s
        if is_left:
            raise CancelledError
        progress, progress_s = progress + 1, time.monotonic()

    work = in_thread("long work", lambda: action(on_progress)) if runs_here else None
    # All ranks meet every few seconds, also those without work or done with it. So no rank waits longer than that for
    # another, and `parallel.timeout_s` still tells a process that is gone from one at work:
    #   no answer at all            the meeting fails              the process is gone or stopped
    #   an answer, no progress      StuckError, on all             the disk or the network hangs
    #   an answer and progress      another round                  however long the work takes
    busy = True
    try:
        while busy:
            if work is not None:
                wait([work], min(INTERVAL_SECONDS, mesh.timeout_s / 10))
            running = work is not None and not work.done()
            stuck = running and time.monotonic() - progress_s > mesh.timeout_s
            busy, stuck_ranks, all_progress = answer_all(mesh, (running, stuck, progress), _summary)
            if stuck_ranks:
                raise StuckError(
                    f"{mesh.named(stuck_ranks)}: {doing} made no progress for more than {mesh.timeout_s:g} s "
                    "(parallel.timeout_s); check the disk and the network there, or raise parallel.timeout_s"
                )
            watch(*(doing, progress) if running else (f"waiting for other ranks: {doing}", all_progress))
    except BaseException:
        is_left = True
        leave()
        if work is not None:
            wait([work], LEAVE_SECONDS)
        raise
    return _results(mesh, (None, None) if work is None else outcome(work.result), everywhere=False)


def _summary(ranks: list[tuple[bool, bool, int]]) -> tuple[bool, list[int], int]:
    """Return whether any rank is at work, the stuck ranks, and the progress of all ranks together."""
    stuck = [rank for rank, (_, is_stuck, _) in enumerate(ranks) if is_stuck]
    return any(running for running, _, _ in ranks), stuck, sum(progress for _, _, progress in ranks)
