"""Ordered parallel map over worker processes."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

from pangu.common.errors import UserError

_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SIGNALS = (*_LEFT_TO_PARENT, signal.SIGTERM)
Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result]:
    """Map `function` over items in worker processes, in order, with few items in memory; 1 worker is this process.

    The workers end with this process, however it ends. Raises the errors of `function`, and UserError if a worker was
    killed.
    """
    if workers == 1:
        yield from map(function, items)
        return
    with _signals_wait():  # this starts the semaphore tracker
        # Forking is unsafe while threads of progress bars and tokenizers run.
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _signals_wait():  # each of the first calls starts a process
                pending.append(pool.submit(function, item))
            if len(pending) >= 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, most likely for lack of host memory; lower --workers (data.workers)"
        ) from error
    finally:
        # wait: a worker that is still starting would report that the pool's semaphores are gone
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals: processes started in the block inherit the mask, this one gets pending signals at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process when its parent ends, even by a kill, or sends SIGTERM."""
    # Ctrl-C, a terminal's SIGHUP and a scheduler's SIGTERM and SIGUSR1 reach all processes: only the parent answers
    parent = parent_process()
    assert parent is not None
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})  # inherited by all threads started from here on

    def wait() -> None:
        parent.join()
        os._exit(1)

    def obey() -> None:
        if hasattr(signal, "sigwaitinfo"):
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
                pass
        else:  # macOS does not report the sender
            signal.sigwait({signal.SIGTERM})
        os._exit(1)

    for task in (wait, obey):
        Thread(target=task, daemon=True).start()
