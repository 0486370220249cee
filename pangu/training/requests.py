"""What signals and the clock ask of a run."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch

from pangu.collectives.reduce import largest
from pangu.topology.mesh import Mesh

PATIENCE_SECONDS = 3.0
"""Launchers look every 0.1 s whether others have come."""


@dataclass(frozen=True)
class Asked:
    """What all ranks do after a step."""

    save: bool
    """Save a checkpoint now."""
    stop: str | None
    """Why the run ends here, after saving; None: it goes on."""
    settle: bool = False
    """Hear now how the last save ended: it has failed."""


class Requests:
    """SIGTERM: save and stop; SIGUSR1: save and go on; a time limit: save and stop before it is over.

    A context manager, in whose block the signals have these meanings. A signal to one process is enough.
    """

    def __init__(self, mesh: Mesh, began: float, limit_s: float | None) -> None:
        """`began`: `time.perf_counter()` when the run was started; `limit_s`: seconds from then on, None: no limit."""
        self._mesh = mesh
        self._deadline = None if limit_s is None else began + limit_s
        self._save = self._terminate = False
        self._before: dict[int, Any] = {}

    def after_step(self, seconds: float, has_failed: bool = False) -> Asked:
        """What was asked for on any rank, the same answer on all.

        Args:
            seconds: what the next step may take.
            has_failed: this rank knows that the last save has failed.
        """
        late = self._deadline is not None and time.perf_counter() + seconds > self._deadline
        mine = torch.tensor([self._save, self._terminate, late, has_failed], dtype=torch.int32)
        mine = mine.to(self._mesh.device)
        save, terminate, late, has_failed = map(bool, largest(mine, self._mesh.group("world")).tolist())
        if save:
            self._save = False
        stop = "SIGTERM" if terminate else "train.stop_after" if late else None
        return Asked(save or stop is not None, stop, has_failed)

    def linger(self) -> None:
        """Wait a little where SIGTERM was sent to other processes only. A launcher that ends its process because others
        join the run takes one that has ended by itself before for a run that is complete."""
        if not self._terminate:
            time.sleep(PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._terminate = True
        else:
            self._save = True
