"""A file that tells outside watchers that a run is alive, and what it is doing."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pangu.config.errors import writing
from pangu.config.files import write_atomically

INTERVAL_SECONDS = 1.0
"""The file is not written more often than that, unless the run does something else."""


class Heartbeat:
    """`heartbeat.json` in the run folder: step, what the run is doing, time (UTC), host, process. Written as training
    goes on, not by a thread of its own, so that a run that hangs falls silent.

    A context manager, whose end writes `ended`, or `failed` with an error. None as folder: writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "heartbeat.json"
        self._step = 0
        self._doing = ""
        self._written = -INTERVAL_SECONDS

    def beat(self, step: int, doing: str) -> None:
        """Say that the run is alive, having made `step` steps.

        Raises:
            UserError: if the file cannot be written.
        """
        now = time.monotonic()
        self._step = step
        if self._path is None or (doing == self._doing and now - self._written < INTERVAL_SECONDS):
            return
        self._doing, self._written = doing, now
        content = {
            "step": step,
            "doing": doing,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        with writing(self._path):
            # a watcher never finds half of it; it need not outlive a crash of the machine
            write_atomically(self._path, f"{json.dumps(content)}\n".encode(), sync=False)

    def __enter__(self) -> Self:
        self.beat(0, "starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.beat(self._step, "ended" if kind is None else "failed")
