"""Agreement on work that may take longer than processes wait for one another: preparing data, writing a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from threading import Thread
from typing import Any, TypeVar

from pangu.collectives.agreement import StuckError, complete, first_message, meet_all, outcome
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh

T = TypeVar("T")

INTERVAL_SECONDS = 10.0
"""Seconds between the heartbeats of processes at long work; less if `parallel.timeout_s` is short."""
LEAVE_SECONDS = 2.0
"""For work to clean up that nobody waits for any more."""


def agree_on_long_work(
    mesh: Mesh,
    doing: str,
    action: Callable[[Callable[[], None]], T],
    *,
    runs_here: bool,
    watch: Callable[[str, int], None] = lambda words, progress: None,
    leave: Callable[[], None] = lambda: None,
) -> list[T | None]:
    """As `agree`, for work that may take longer than `parallel.timeout_s` but has to make progress within it. It runs
    in a thread, so that processes can exchange heartbeats. The results, which may be large, are returned on the first
    process only, an empty list elsewhere.

    `doing`: the work in words, e.g. "writing"; `action` gets a function to call whenever it has made progress. Raises
    StuckError on every process, naming the ranks whose action makes no progress in time. `watch` hears every few
    seconds what this process does and how often it has got on; one that only waits, how often all together have.

    If this process does not wait for the action any longer, because of an error elsewhere or Ctrl-C, the function that
    notes progress raises CancelledError in it, and `leave` is called, to end what it may wait for itself.
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
    # All meet every few seconds, those that have no work or are done with it too. So nobody waits for another longer
    # than that, and `parallel.timeout_s` still tells a process that is gone from one at work:
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
                    f"{mesh.named(stuck_ranks)}: {doing} does not get on for more than {mesh.timeout_s:g} s "
                    "(parallel.timeout_s); look at the disk and the network there, or raise the limit"
                )
            watch(*(doing, progress) if running else (f"waiting for others, {doing}", of_all))
    except BaseException:
        is_left = True
        leave()
        if runs_here:
            wait([work], LEAVE_SECONDS)
        raise
    return _results(mesh, outcome(work.result) if runs_here else (None, None))


def _results(mesh: Mesh, result: tuple[T | None, str | None]) -> list[T | None]:
    """Those of all, on the first process; an empty list elsewhere. Raises UserError if any has a message."""
    results: list[T | None] = []

    def keep(outcomes: list[tuple[T | None, str | None]]) -> str | None:
        results.extend(result for result, _ in outcomes)
        return first_message(outcomes)

    message = meet_all(mesh, result, keep)
    if message is not None:
        raise UserError(message)
    return results


def _summary(ranks: list[tuple[bool, bool, int]]) -> tuple[bool, list[int], int]:
    """True if any of the ranks works, those that are stuck, and how often all together have got on."""
    stuck = [rank for rank, (_, is_stuck, _) in enumerate(ranks) if is_stuck]
    return any(running for running, _, _ in ranks), stuck, sum(progress for _, _, progress in ranks)
