"""Passing items through several processes."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator

import pytest

from pangu.common.errors import UserError
from pangu.data.workers import parallel_map


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_map_keeps_order_and_reads_little_ahead(workers: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(40):
            taken.append(item)
            yield item

    results = parallel_map(math.sqrt, items(), workers)
    assert next(results) == 0
    assert len(taken) <= 4 * workers
    assert [0, *results] == [math.sqrt(item) for item in range(40)]


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_map_raises_what_the_function_raised(workers: int) -> None:
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        list(parallel_map(math.sqrt, [1, -1, 1], workers))


def signalled(item: int) -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return item


def test_workers_leave_signals_to_their_parent() -> None:
    """A scheduler's go to all processes, and the run that is told to stop still needs its data."""
    assert list(parallel_map(signalled, range(20), 2)) == list(range(20))


def test_a_killed_worker_is_told() -> None:
    with pytest.raises(UserError, match=r"worker process was killed.*lower --workers"):
        list(parallel_map(os._exit, [1] * 50, 2))
