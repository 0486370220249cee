"""Agreement on work that may exceed the timeout of collectives, such as preparing data or writing a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from threading import Thread
from typing import Any, TypeVar

from pangu.collectives.agreement import StuckError, complete, first_message, meet_all, outcome
from pangu.common.errors import UserError
from pangu.topology.mesh import Mesh

T = TypeVar("T")

INTERVAL_SECONDS = 10.0
"""Heartbeat interval of processes at long work, in seconds; less if `parallel.timeout_s` is short."""
LEAVE_SECONDS = 2.0
"""Time for abandoned work to clean up, in seconds."""


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

    def note_progress() -> None:
        nonlocal progress, progress_s
        if is_left:
            raise CancelledError
        progress, progress_s = progress + 1, time.monotonic()

    work: Future[Any] = Future()
    if runs_here:
        arguments = (work, lambda: action(note_progress))
        Thread(target=complete, args=arguments, name="long work", daemon=True).start()
    # All ranks meet every few seconds, also those without work or done with it. So no rank waits longer than that for
    # another, and `parallel.timeout_s` still tells a process that is gone from one at work:
    #   no answer at all            the meeting fails              the process is gone or stopped
    #   an answer, no progress      StuckError, on all             the disk or the network hangs
    #   an answer and progress      another round                  however long the work takes
    busy = True
    try:
        while busy:
            if runs_here:
                wait([work], min(INTERVAL_SECONDS, mesh.timeout_s / 10))
            running = runs_here and not work.done()
            stuck = running and time.monotonic() - progress_s > mesh.timeout_s
            busy, stuck_ranks, of_all = meet_all(mesh, (running, stuck, progress), _summary)
            if stuck_ranks:
                raise StuckError(
                    f"{mesh.named(stuck_ranks)}: {doing} made no progress for more than {mesh.timeout_s:g} s "
                    "(parallel.timeout_s); check the disk and the network there, or raise parallel.timeout_s"
                )
            watch(*(doing, progress) if running else (f"waiting for other ranks: {doing}", of_all))
    except BaseException:
        is_left = True
        leave()
        if runs_here:
            wait([work], LEAVE_SECONDS)
        raise
    return _results(mesh, outcome(work.result) if runs_here else (None, None))


def _results(mesh: Mesh, result: tuple[T | None, str | None]) -> list[T | None]:
    """Return the results of all ranks on rank 0, an empty list elsewhere; raise the first error as `UserError`."""
    results: list[T | None] = []

    def keep(outcomes: list[tuple[T | None, str | None]]) -> str | None:
        results.extend(result for result, _ in outcomes)
        return first_message(outcomes)

    message = meet_all(mesh, result, keep)
    if message is not None:
        raise UserError(message)
    return results


def _summary(ranks: list[tuple[bool, bool, int]]) -> tuple[bool, list[int], int]:
    """Return whether any rank is at work, the stuck ranks, and the progress of all ranks together."""
    stuck = [rank for rank, (_, is_stuck, _) in enumerate(ranks) if is_stuck]
    return any(running for running, _, _ in ranks), stuck, sum(progress for _, _, progress in ranks)
