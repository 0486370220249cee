"""Errors over ranks: all processes learn what one fails at, so that none waits for one that gave up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import torch

from pangu.collectives.reduce import gather_objects, largest
from pangu.config.errors import LocalError, UserError
from pangu.topology.mesh import Mesh, is_silence

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
"""Seconds between the heartbeats of processes at long work; less if `parallel.timeout_s` is short."""


class StuckError(UserError):
    """The work of some process makes no progress. Raised on all processes."""


@contextmanager
def name_silent_ranks(mesh: Mesh, where: Callable[[], str]) -> Iterator[None]:
    """Turn a collective that fails within the block into a LocalError with this rank, the text of `where` and the
    silent ranks, as far as they are known."""
    try:
        yield
    except RuntimeError as error:
        if not is_silence(error):
            raise
        place, silent = where(), mesh.silent_ranks()
        others = f"rank {', '.join(map(str, silent))}" if silent else "another process"
        raise LocalError(
            f"rank {mesh.rank}, {place}: {others} did not answer within parallel.timeout_s, or is gone; what that one "
            f"says, if it still speaks, is the cause ({error})"
        ) from error


def agree(mesh: Mesh, action: Callable[[], T], *, here: bool) -> list[T | None]:
    """Run `action` on the processes where `here` is true; all return when all have finished, with the results of all
    ranks in order (None where it did not run). A UserError on any rank is raised on every one."""
    result, message = None, None
    if here:
        try:
            result = action()
        except UserError as error:
            message = str(error)
    answers = gather_objects((result, message), mesh.group("world"))
    messages = [text for _, text in answers if text is not None]
    if messages:
        raise UserError(messages[0])
    return [value for value, _ in answers]


def agree_on_long_work(
    mesh: Mesh, doing: str, action: Callable[[Callable[[], None]], T], *, here: bool
) -> list[T | None]:
    """As `agree`, for work that may take longer than `parallel.timeout_s` but has to make progress within it. It runs
    in a thread, so that processes can exchange heartbeats.

    `mesh`: of a group that nothing else uses meanwhile, see `Mesh.background`; `doing`: the work in words, e.g.
    "writing"; `action` gets a function to call whenever it has made progress. Raises StuckError on every process,
    naming the ranks whose action makes no progress in time, and RuntimeError if one does not answer, see
    `name_silent_ranks`.
    """
    world = mesh.group("world")
    progress_s = time.monotonic()

    def note_progress() -> None:
        nonlocal progress_s
        progress_s = time.monotonic()

    work: Future[Any] = Future()
    if here:
        arguments = (work, lambda: action(note_progress))
        Thread(target=complete, args=arguments, name="long work", daemon=True).start()
    # All come to a small collective about once a second, those that have no work or are done with it too. So nobody
    # waits for another longer than that, and `parallel.timeout_s` still tells a process that is gone from one at work:
    #   no answer at all            the collective fails           the process is gone or stopped
    #   an answer, no progress      StuckError, on all             the disk or the network hangs
    #   an answer and progress      another round                  however long the work takes
    busy = True
    while busy:
        if here:
            wait([work], min(INTERVAL_SECONDS, mesh.timeout_s / 10))
        running = here and not work.done()
        stuck = running and time.monotonic() - progress_s > mesh.timeout_s
        busy, any_stuck = map(bool, largest(torch.tensor([running, stuck], dtype=torch.int32), world).tolist())
        if any_stuck:
            ranks = [str(rank) for rank, is_stuck in enumerate(gather_objects(stuck, world)) if is_stuck]
            raise StuckError(
                f"rank {', '.join(ranks)}: {doing} does not get on for more than {mesh.timeout_s:g} s "
                "(parallel.timeout_s); look at the disk and the network there"
            )
    return agree(mesh, work.result, here=here)


def complete(future: Future[T], action: Callable[[], T]) -> None:
    """Run an action, whose result or error becomes that of `future`."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
