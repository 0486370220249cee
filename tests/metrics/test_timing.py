"""Algorithms are timed in turns, within a budget, and the choice between them is stable."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import torch

from pangu.metrics.timing import COLLECTIVE_ROUNDS, ROUNDS, SURE, fastest, one_thread, time_candidates

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


def test_every_rank_makes_as_many_collectives_however_slow_they_are() -> None:
    watch = Stopwatch()
    time_candidates({"a": watch.way("a", 1.0), "b": watch.way("b", 50.0)}, CPU, None, lambda: watch.now)
    assert watch.calls == ["a", "b"] * (COLLECTIVE_ROUNDS + 1)


def test_equally_fast_ways_fall_to_the_first_and_inexact_ones_to_nobody() -> None:
    device = torch.device("cuda")
    assert fastest({"a": 1.02, "b": 1.0}, device) == "a"
    assert fastest({"a": 1.05, "b": 1.0}, device) == "b"
    assert fastest({"a": 1.05, "b": 1.0}, CPU) == "a"
    assert fastest({"a": 1.15, "b": 1.0}, CPU) == "b"
    assert fastest({"a": math.inf, "b": 7.0}, CPU) == "b"
    assert fastest({"a": 0.0}, CPU) == "a"


def test_a_busy_machine_does_not_change_who_is_faster() -> None:
    """With several threads the first of two equals was twenty times as slow in some runs."""
    x, before = torch.randn(256, 256), torch.get_num_threads()
    with one_thread(CPU):
        assert torch.get_num_threads() == 1
        processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        try:
            chosen = [
                fastest(time_candidates({"a": lambda: x @ x, "b": lambda: x @ x}, CPU, 0.2), CPU) for _ in range(5)
            ]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert chosen.count("a") >= 4
    assert torch.get_num_threads() == before
    with one_thread(torch.device("cuda")):
        assert torch.get_num_threads() == before
