"""Checks of times that hold on a slow or busy machine too."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PACES = (1.0, 5.0, 25.0)
TURNS = 1_000_000
TURNS_SECONDS = 0.1
"""Processor time of so many turns of an empty loop on a slow machine of today."""


def at_some_pace(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test of what happens within limits of time. It multiplies all of them, and the times that it compares
    them with, by its argument `pace`: 1, and 5 and 25 where it failed, because the machine may have been too busy. What
    is wrong with the program is wrong at every pace."""

    @functools.wraps(test)
    def repeated(**fixtures: Any) -> None:
        for pace in PACES[:-1]:
            try:
                return test(**fixtures, pace=pace)
            except (Exception, pytest.fail.Exception) as error:
                print(f"at pace {pace:g}: {error}")
        return test(**fixtures, pace=PACES[-1])

    signature = inspect.signature(test)
    asked_for = [parameter for name, parameter in signature.parameters.items() if name != "pace"]
    repeated.__signature__ = signature.replace(parameters=asked_for)  # type: ignore[attr-defined]
    return repeated


@contextmanager
def processor_time_below(limit_s: float) -> Iterator[None]:
    """Assert that this process computes for less than `limit_s` in the block, or for longer on a slower machine in
    proportion to what a fixed loop takes there."""
    began_s = time.process_time()
    try:
        yield
    finally:
        taken_s = time.process_time() - began_s
        if taken_s >= limit_s:
            limit_s *= max(1.0, _loop_seconds() / TURNS_SECONDS)
            assert taken_s < limit_s, f"{taken_s:.1f} s of processor time; {limit_s:.1f} s are allowed"


def _loop_seconds() -> float:
    began_s = time.process_time()
    for _ in range(TURNS):
        pass
    return time.process_time() - began_s
