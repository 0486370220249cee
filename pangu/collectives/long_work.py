"""Agreement on work that may take longer than processes wait for one another, such as writing a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

from pangu.collectives.agreement import StuckError, complete, first_message, meet_all, outcome
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh

T = TypeVar("T")

INTERVAL_SECONDS = 10.0
"""Seconds between the heartbeats of processes at long work; less if `parallel.timeout_s` is short."""


def agree_on_long_work(
    mesh: Mesh, doing: str, action: Callable[[Callable[[], None]], T], *, runs_here: bool
) -> list[T | None]:
    """As `agree`, for work that may take longer than `parallel.timeout_s` but has to make progress within it. It runs
    in a thread, so that processes can exchange heartbeats. The results, which may be large, are returned on the first
    process only, an empty list elsewhere.

    `doing`: the work in words, e.g. "writing"; `action` gets a function to call whenever it has made progress. Raises
    StuckError on every process, naming the ranks whose action makes no progress in time.
    """
    progress_s = time.monotonic()

    def note_progress() -> None:
        nonlocal progress_s
        progress_s = time.monotonic()

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
    while busy:
        if runs_here:
            wait([work], min(INTERVAL_SECONDS, mesh.timeout_s / 10))
        running = runs_here and not work.done()
        stuck = running and time.monotonic() - progress_s > mesh.timeout_s
        busy, stuck_ranks = meet_all(
            mesh,
            (running, stuck),
            lambda flags: (any(busy for busy, _ in flags), [rank for rank, (_, stuck) in enumerate(flags) if stuck]),
        )
        if stuck_ranks:
            raise StuckError(
                f"{mesh.named(stuck_ranks)}: {doing} does not get on for more than {mesh.timeout_s:g} s "
                "(parallel.timeout_s); look at the disk and the network there"
            )
    results: list[T | None] = []

    def keep(outcomes: list[tuple[T | None, str | None]]) -> str | None:
        results.extend(result for result, _ in outcomes)
        return first_message(outcomes)

    message = meet_all(mesh, outcome(work.result) if runs_here else (None, None), keep)
    if message is not None:
        raise UserError(message)
    return results
