"""Median times of actions on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

from pangu.common.cores import available_cores

Name = TypeVar("Name", bound=Hashable)


class Clock:
    """Timer of actions on a device."""

    def __init__(self, device: torch.device, quick: bool, processes: int = 1) -> None:
        """Create the timer; `processes` share the cores of a host, and a `quick` one times everything once."""
        self.device = device
        self.on_host = device.type == "cpu"
        self.crowding = max(1.0, processes * torch.get_num_threads() / available_cores()) if self.on_host else 1.0
        """Factor by which processes that compute at a time share the cores of a host."""
        self._least = 0.002 if quick else 0.02
        self._rounds = 1 if quick else 5

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the median time of an action."""
        return self.in_turns({"": self.computing(action)})[""]

    def in_turns(self, samples: Mapping[Name, Callable[[], float]], often: int = 1) -> dict[Name, float]:
        """Return the median of each sample, from `often` times the usual number of rounds.

        All take turns: what disturbs the machine disturbs all of them.
        """
        rounds = [{name: sample() for name, sample in samples.items()} for _ in range(1 + often * self._rounds)]
        return {name: median(one[name] for one in rounds[1:]) for name in samples}

    def computing(self, action: Callable[[], object]) -> Callable[[], float]:
        """Return a sample of an action's time, in seconds.

        On a host with one thread it is the processor's, which other processes change least, as often as processes
        share a core.
        """
        alone = self.on_host and torch.get_num_threads() == 1
        read, repeats = time.process_time if alone else time.perf_counter, 0

        def sample() -> float:
            nonlocal repeats
            if not repeats:
                self._timed(action, 1, read)
                repeats = max(1, int(self._least / max(self._timed(action, 1, read), 1e-7)))
            return self._timed(action, repeats, read) * (self.crowding if alone else 1.0)

        return sample

    def working(self, action: Callable[[], object], often: int) -> Callable[[], float]:
        """Return a sample of the processor time of what all processes, which share cores, do as `often`."""
        return lambda: self._timed(action, often, time.process_time) * self.crowding

    def meeting(
        self, action: Callable[[], object], often: int, before: Callable[[], object] | None = None
    ) -> Callable[[], float]:
        """Return a sample of an action's time, where all processes carry it out `often`, each time after `before`."""

        def both() -> None:
            if before is not None:
                before()
            action()

        def sample() -> float:
            less = 0.0 if before is None else self._timed(before, often, time.perf_counter)
            return self._timed(both, often, time.perf_counter) - less

        return sample

    def _timed(self, action: Callable[[], object], repeats: int, read: Callable[[], float]) -> float:
        self._wait()
        begin = read()
        for _ in range(repeats):
            action()
        self._wait()
        return (read() - begin) / repeats

    def _wait(self) -> None:
        if not self.on_host:
            torch.accelerator.synchronize()
