"""Agreement between processes through the run's store: an error on one is raised on all, so that none waits forever.

No collective is involved: host work (reading, hashing, writing) may be slow without blocking the device, and a
background thread may agree with its peers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from pangu.collectives.meeting import meet, silent_ranks
from pangu.common.errors import SILENCE_SECONDS, STORE_SECONDS, LostError, UserError
from pangu.topology.mesh import Mesh, is_silence

T = TypeVar("T")
A = TypeVar("A")


class StuckError(UserError):
    """Error raised on all processes when the work of one makes no progress."""


@contextmanager
def name_silent_ranks(mesh: Mesh, where: Callable[[], str]) -> Iterator[None]:
    """Turn a collective that times out in the block into a `LostError` with `where()` and the silent ranks if known."""
    try:
        yield
    except RuntimeError as error:
        if not is_silence(error):
            raise
        place = where()
        try:
            silent = answer_of_store(SILENCE_SECONDS + STORE_SECONDS, partial(silent_ranks, mesh))
        except RuntimeError:
            silent = [] if mesh.keeper in (None, mesh.rank) else [mesh.keeper]
        others = mesh.named(silent) if silent else "another process"
        raise LostError(
            f"{mesh.name}, {place}: {others} did not respond within parallel.timeout_s, or exited; look for the "
            f"cause in its output ({error})"
        ) from error


def agree(mesh: Mesh, action: Callable[[], T], *, runs_here: bool) -> list[T | None]:
    """Run `action` where `runs_here` is true, and return the results of all ranks in order once all have finished.

    The result is None where the action did not run. A `UserError` on any rank is raised on every rank; `RuntimeError`
    (see `is_silence`) if a rank does not answer within `parallel.timeout_s`.
    """
    message, results = meet_all(
        mesh,
        outcome(action) if runs_here else (None, None),
        lambda outcomes: (first_message(outcomes), [result for result, _ in outcomes]),
    )
    if message is not None:
        raise UserError(message)
    return results


def outcome(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `action` and None, or None and the message of its `UserError`."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)


def first_message(outcomes: list[tuple[T | None, str | None]]) -> str | None:
    """Return the error message of the first rank that has one, or None."""
    return next((message for _, message in outcomes if message is not None), None)


def meet_all(mesh: Mesh, value: T, answer: Callable[[list[T]], A]) -> A:
    """Pass the values of all processes, in rank order, to `answer` on rank 0, and return its result on all."""
    # Raises RuntimeError (see `is_silence`) if a process does not arrive within `parallel.timeout_s`.
    if mesh.layout.world == 1:
        return answer([value])
    return answer_of_store(mesh.timeout_s + STORE_SECONDS, partial(meet, mesh, value, answer))


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
        raise dist.DistStoreError("the store does not answer") from error


def complete(future: Future[T], action: Callable[[], T]) -> None:
    """Run `action` and set its result or error on `future`."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
