"""Errors over ranks: all processes learn what one fails at, so that none waits for one that gave up.

Processes meet through the run's store, in no collective: what hosts do (reading, hashing, writing) may take long, which
no device has to wait for, and a thread beside training may meet as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from pangu.config.errors import SILENCE_SECONDS, STORE_SECONDS, LostError, UserError
from pangu.topology.mesh import Mesh, is_silence

T = TypeVar("T")
A = TypeVar("A")


class StuckError(UserError):
    """The work of some process makes no progress. Raised on all processes."""


@contextmanager
def name_silent_ranks(mesh: Mesh, where: Callable[[], str]) -> Iterator[None]:
    """Turn a collective that fails within the block into a LostError with this rank, the text of `where` and the
    silent ranks, as far as they are known."""
    try:
        yield
    except RuntimeError as error:
        if not is_silence(error):
            raise
        from pangu.collectives.meeting import silent_ranks

        place = where()
        try:
            silent = answer_of_store(SILENCE_SECONDS + STORE_SECONDS, partial(silent_ranks, mesh))
        except RuntimeError:
            silent = [] if mesh.keeper in (None, mesh.rank) else [mesh.keeper]
        others = mesh.named(silent) if silent else "another process"
        raise LostError(
            f"{mesh.name}, {place}: {others} did not answer within parallel.timeout_s, or is gone; what that one "
            f"says, if it still speaks, is the cause ({error})"
        ) from error


def agree(mesh: Mesh, action: Callable[[], T], *, runs_here: bool) -> list[T | None]:
    """Run `action` on the processes where `runs_here` is true; all return when all have finished, with the results of
    all ranks in order (None where it did not run). A UserError on any rank is raised on every one. Raises RuntimeError
    if one does not answer within `parallel.timeout_s`, see `name_silent_ranks`."""
    message, results = meet_all(
        mesh,
        outcome(action) if runs_here else (None, None),
        lambda outcomes: (first_message(outcomes), [result for result, _ in outcomes]),
    )
    if message is not None:
        raise UserError(message)
    return results


def outcome(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """What an action returns, or the message of the UserError that it raises."""
    try:
        return action(), None
    except UserError as error:
        return None, str(error)


def first_message(outcomes: list[tuple[T | None, str | None]]) -> str | None:
    return next((message for _, message in outcomes if message is not None), None)


def meet_all(mesh: Mesh, value: T, answer: Callable[[list[T]], A]) -> A:
    """All processes come with a value; what `answer` makes of them, in rank order, on the first one, is returned on
    all. Raises RuntimeError, see `is_silence`, if one does not come within `parallel.timeout_s`."""
    if mesh.layout.world == 1:
        return answer([value])
    from pangu.collectives.meeting import meet

    return answer_of_store(mesh.timeout_s + STORE_SECONDS, partial(meet, mesh, value, answer))


def answer_of_store(limit_s: float, action: Callable[[], T]) -> T:
    """What an action returns that asks the store. Raises RuntimeError, see `is_silence`, if it takes longer than
    `limit_s`: a process that is stopped lets the others wait for its store for ever."""
    future: Future[T] = Future()
    thread = Thread(target=complete, args=(future, action), name="store", daemon=True)
    thread.start()
    try:
        result = future.result(limit_s)
        thread.join()  # Python ends with an abort if a thread is in the store then
        return result
    except TimeoutError as error:
        raise dist.DistStoreError("the store does not answer") from error


def complete(future: Future[T], action: Callable[[], T]) -> None:
    """Run an action, whose result or error becomes that of `future`."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
