"""Algorithms are timed in turns, within a budget, and the choice between them is stable."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pangu.metrics import timing
from pangu.metrics.timing import ROUNDS, SURE, fastest, one_thread, time_candidates

CPU = torch.device("cpu")


class Stopwatch:
    """A clock that only the ways turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def way(self, name: str, *seconds: float) -> Callable[[], object]:
        """Takes so long the first, second, ... time, and from then on as long as the last."""
        left = list(seconds)

        def once() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return once


def test_the_smallest_time_counts_and_the_first_does_not() -> None:
    watch = Stopwatch()
    ways = {"a": watch.way("a", 0.0, 0.3, 0.1, 0.2), "b": watch.way("b", 9.0, 0.2)}
    assert time_candidates(ways, CPU, 100.0, lambda: watch.now) == {"a": 0.09999999999999964, "b": 0.1999999999999993}


def test_ways_take_turns_and_hopeless_ones_drop_out() -> None:
    watch = Stopwatch()
    times = time_candidates({"a": watch.way("a", 1.0), "b": watch.way("b", 4.0)}, CPU, 100.0, lambda: watch.now)
    assert times == {"a": 1.0, "b": 4.0}
    assert watch.calls[: 2 * (SURE + 1)] == ["a", "b"] * (SURE + 1)
    assert watch.calls.count("b") == SURE + 1
    assert watch.calls.count("a") == ROUNDS + 1


def test_equally_fast_ways_fall_to_the_first_and_inexact_ones_to_nobody() -> None:
    device = torch.device("cuda")
    assert fastest({"a": 1.02, "b": 1.0}, device) == "a"
    assert fastest({"a": 1.05, "b": 1.0}, device) == "b"
    assert fastest({"a": 1.05, "b": 1.0}, CPU) == "a"
    assert fastest({"a": 1.15, "b": 1.0}, CPU) == "b"
    assert fastest({"a": math.inf, "b": 7.0}, CPU) == "b"
    assert fastest({"a": 0.0}, CPU) == "a"


def test_a_busy_machine_does_not_change_who_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes change the time that passes, of which the first of two equals took twenty times as much in some
    runs with several threads, more than the processor time of one."""
    busy, alone = Stopwatch(), Stopwatch()
    clocks = SimpleNamespace(perf_counter=lambda: busy.now, process_time=lambda: alone.now)
    monkeypatch.setattr(timing, "time", clocks)
    elapsed = {"a": busy.way("a", 0.2), "b": busy.way("b", 0.01)}
    used = {"a": alone.way("a", 0.01), "b": alone.way("b", 0.01)}

    def once(name: str) -> None:
        elapsed[name]()
        used[name]()

    ways, before = {name: partial(once, name) for name in elapsed}, torch.get_num_threads()
    with one_thread(CPU):
        assert torch.get_num_threads() == 1
        assert fastest(time_candidates(ways, CPU, 100.0), CPU) == "a"
    assert torch.get_num_threads() == before
    with one_thread(torch.device("cuda")):
        assert torch.get_num_threads() == before
