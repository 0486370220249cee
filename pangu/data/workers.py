"""Passing items through several processes."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

from pangu.config.errors import UserError

_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SIGNALS = (*_LEFT_TO_PARENT, signal.SIGTERM)
Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map` over several processes, in order, with only a few items in memory; one worker means this process. The
    workers end with this process, however it ends. Raises the errors of `function`, and UserError if a worker was
    killed."""
    if workers == 1:
        yield from map(function, items)
        return
    with _signals_wait():  # this starts the tracker of semaphores
        # Forking is unsafe beside the threads of progress bars and tokenizers.
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _signals_wait():  # the first times, each starts a process
                pending.append(pool.submit(function, item))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely for lack of memory; use fewer --workers, or data.workers"
        ) from error
    finally:
        # one that still starts would not find the pool's semaphores any more, and say so
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A process that is started in the block begins without signals; this one gets them at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process when its parent ends, also by a kill, or sends SIGTERM. Ctrl-C, the SIGHUP of a terminal that is
    closed, and SIGTERM and SIGUSR1 of a scheduler go to all processes of a job: only the parent answers them."""
    parent = parent_process()
    assert parent is not None
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})  # of all threads that begin from here on

    def wait() -> None:
        parent.join()
        os._exit(1)

    def obey() -> None:
        if hasattr(signal, "sigwaitinfo"):
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
                pass
        else:  # macOS does not say who sent it
            signal.sigwait({signal.SIGTERM})
        os._exit(1)

    for task in (wait, obey):
        Thread(target=task, daemon=True).start()
