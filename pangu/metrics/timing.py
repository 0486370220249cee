"""Which of several candidates for the same result is the fastest here: short timings, taken in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
Trial = Callable[[], object]
"""Does the work of a candidate once."""
Timer = Callable[[Mapping[Any, Trial], torch.device, float | None], dict[Any, float]]
"""`time_candidates`, or what stands in for it."""

ROUNDS = 20
"""Most timings of one candidate, after one that warms up: libraries are loaded and kernels made then."""
COLLECTIVE_ROUNDS = 10
"""The same of collectives, none of which is left out early: the ranks wait for one another."""
SURE = 2
"""Timings after which a hopeless candidate is not timed again."""
HOPELESS = 2.0
"""A candidate is hopeless if it takes so many times as long as the fastest."""
BUSY_BYTES = 2**30
"""Written before a timing on an accelerator: a third of a millisecond."""
TIE = 1.02
"""Candidates whose times differ by no more than this factor are equally fast."""
HOST_TIE = 1.1
"""The same on a CPU: on a busy one, nine of ten pairs of equal candidates differ by less."""


def time_candidates(
    candidates: Mapping[Name, Trial],
    device: torch.device,
    budget_s: float | None,
    clock: Callable[[], float] | None = None,
) -> dict[Name, float]:
    """Smallest time of each candidate, in seconds.

    All are timed in turns, so that what disturbs the machine disturbs all of them, and the smallest time is what it
    can do undisturbed. With one thread on a CPU (`one_thread`) it is the processor time, which other processes change
    least; threads that wait for one another take processor time as well, so with several it is the time that passes.

    Args:
        device: what they compute on; of an accelerator it is the time by events, of collectives until it is done.
        budget_s: no further round begins after so many seconds, warming up not counted, and what takes a quarter of it
            is not timed again. None: the candidates are collectives, of which all ranks must make as many, and what
            counts is how long a rank waits.
        clock: seconds; None: the one that fits.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and budget_s is not None
    read = clock or (time.process_time if alone else time.perf_counter)
    on_device = device.type != "cpu" and budget_s is not None
    seconds = partial(_of_device, device=device) if on_device else partial(_timed, device=device, read=read)
    best = dict.fromkeys(candidates, math.inf)
    for once in candidates.values():
        seconds(once)
    running, began = list(candidates), time.perf_counter()
    for number in range(1, (COLLECTIVE_ROUNDS if budget_s is None else ROUNDS) + 1):
        for name in running:
            best[name] = min(best[name], seconds(candidates[name]))
        if budget_s is not None:
            if time.perf_counter() - began > budget_s:
                break
            limit = min(budget_s / 4, HOPELESS * min(best.values()) if number >= SURE else math.inf)
            running = [name for name in running if best[name] < limit]
    return best


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on one thread within the block, if `device` is a CPU: with several on a busy machine, equal candidates
    differ twentyfold, by either clock."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _of_device(once: Trial, device: torch.device) -> float:
    """Its time by events, not the host's, which queues the work while the device is kept busy; that also leaves nothing
    of the operands in the device's caches, as other layers would."""
    torch.empty(BUSY_BYTES, dtype=torch.uint8, device=device).zero_()
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    once()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _timed(once: Trial, device: torch.device, read: Callable[[], float]) -> float:
    start = read()
    once()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return read() - start


def fastest(times: Mapping[Name, float], device: torch.device, tie: float = TIE) -> Name:
    """Return the first candidate that is as fast as the fastest, up to `tie` and the noise of `device`: the order is a
    preference, which keeps a choice between equals the same from start to start. An infinite time stands for one that
    cannot be taken."""
    if device.type == "cpu":
        tie = max(tie, HOST_TIE)
    limit = tie * min(times.values())
    return next(name for name, seconds in times.items() if seconds <= limit)
