"""Short benchmarks that pick the fastest of several candidates for the same result on this machine."""

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
"""Function that does the work of a candidate once."""
Timer = Callable[[Mapping[Any, Trial], torch.device, float], dict[Any, float]]
"""Signature of `time_candidates` and its replacements."""

ROUNDS = 20
"""Maximum timings per candidate, after one warm-up that loads libraries and compiles kernels."""
SURE = 2
"""Number of timings after which a hopeless candidate is dropped."""
HOPELESS = 2.0
"""Factor over the fastest time at which a candidate is hopeless."""
BUSY_BYTES = 2**30
"""Bytes to write before a timing on an accelerator, to keep it busy for a third of a millisecond."""
TIE = 1.02
"""Factor within which the times of two candidates count as equal."""
HOST_TIE = 1.1
"""Factor for equal times on a CPU: on a busy one, nine of ten pairs of equal candidates differ by less."""


def time_candidates(
    candidates: Mapping[Name, Trial],
    device: torch.device,
    budget_s: float,
    clock: Callable[[], float] | None = None,
) -> dict[Name, float]:
    """Return the smallest time of each candidate, in seconds.

    Candidates take turns, so that a disturbance of the machine affects all of them, and the smallest time is the
    undisturbed one. With one CPU thread (`one_thread`) this is processor time, which other processes affect least; with
    several it is wall time, since threads that wait for one another use processor time.

    Args:
        candidates: Functions by name.
        device: Device to compute on; an accelerator is timed by events.
        budget_s: Seconds after which no further round starts, without warm-up; a candidate that takes a quarter of it
            is not repeated.
        clock: Function that returns seconds; None: chosen as above.
    """
    read = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    seconds = partial(_timed, read=read) if device.type == "cpu" else partial(_of_device, device=device)
    best = dict.fromkeys(candidates, math.inf)
    for once in candidates.values():
        seconds(once)
    running, began = list(candidates), time.perf_counter()
    for number in range(1, ROUNDS + 1):
        for name in running:
            best[name] = min(best[name], seconds(candidates[name]))
        if time.perf_counter() - began > budget_s:
            break
        limit = min(budget_s / 4, HOPELESS * min(best.values()) if number >= SURE else math.inf)
        running = [name for name in running if best[name] < limit]
    return best


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on one thread in the block if `device` is a CPU."""
    # With several threads on a busy machine, equal candidates differ twentyfold, by either clock.
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _of_device(once: Trial, device: torch.device) -> float:
    """Return the seconds of a trial by device events."""
    # Writing keeps the device busy while the host queues the trial, and evicts its operands from the device's caches,
    # as other layers would.
    torch.empty(BUSY_BYTES, dtype=torch.uint8, device=device).zero_()
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    once()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _timed(once: Trial, read: Callable[[], float]) -> float:
    start = read()
    once()
    return read() - start


def fastest(times: Mapping[Name, float], device: torch.device) -> Name:
    """Return the first candidate whose time is within the noise of the fastest.

    The order is a preference, so that the choice among equals does not change between runs. An infinite time marks a
    candidate that cannot be used.
    """
    limit = (HOST_TIE if device.type == "cpu" else TIE) * min(times.values())
    return next(name for name, seconds in times.items() if seconds <= limit)
