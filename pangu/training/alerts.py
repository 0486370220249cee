"""Alerts: a command of the user that is started for log lines which somebody should see now.

A line of the log becomes an alert by the attribute `alert`, the kind of event:

    log.warning("%s", error, extra={"alert": "failed_save"})
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from types import TracebackType
from typing import Self

from pangu.common.errors import UserError
from pangu.metrics.trackers import Alert, AlertHandler

log = logging.getLogger("pangu")

LIMIT_SECONDS = 10.0
"""Time for the command, after which it is killed, and for the last alerts at the end of a run."""
REPEAT_SECONDS = 60.0
"""Shortest time between two alerts of one kind; those in between are counted."""
MOST_WAITING = 100


class Alerts(AlertHandler):
    """Runner of `train.alert_command`, with one JSON line on its standard input for each alert.

    Use it as a context manager on the first rank. A thread runs the commands, one after the other, so that training
    never waits for them. No shell is involved.
    """

    def __init__(self, command: Sequence[str], run: Path) -> None:
        """Prepare the command for the run folder `run`. Raises UserError if there is no such program."""
        super().__init__(self._send)
        self._command, self._run = tuple(command), run
        self._sent_s: dict[str, float] = {}
        """Time of the last alert of each kind."""
        self._left_out: Counter[str] = Counter()
        self._waiting: Queue[Alert | None] = Queue(MOST_WAITING)
        self._thread = Thread(target=self._work, name="alerts", daemon=True)
        if command and shutil.which(command[0]) is None:
            rule = "is not a program that this machine can run; use a path, or [] for no alerts"
            raise UserError(f"train.alert_command: {command[0]}: {rule}")

    def __enter__(self) -> Self:
        """Listen to the log."""
        if self._command:
            log.addHandler(self)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Send how the run ended, and wait for the command, but not forever."""
        if not self._command:
            return
        log.removeHandler(self)
        if error is not None:
            self._send(Alert("failed", str(error) or type(error).__name__))
        elif "stopped" not in self._sent_s:
            self._send(Alert("ended", f"{self._run}: the run is complete"))
        with suppress(Full):
            self._waiting.put_nowait(None)
        self._thread.join(LIMIT_SECONDS)

    def _send(self, alert: Alert) -> None:
        kind, now = alert.kind, time.monotonic()
        if now - self._sent_s.get(kind, -REPEAT_SECONDS) < REPEAT_SECONDS:
            self._left_out[kind] += 1
            return
        self._sent_s[kind] = now
        content = {
            "event": kind,
            "message": alert.message,
            "left_out": self._left_out.pop(kind, 0),
            "run": str(self._run.absolute()),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        with suppress(Full):  # the command takes longer than events take to happen
            self._waiting.put_nowait(Alert(kind, f"{json.dumps(content)}\n"))

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            kind, line = alert
            problem = self._carry_out(line)
            if problem:
                log.warning("train.alert_command: %s, for the alert %r", problem, kind)

    def _carry_out(self, line: str) -> str:
        """Run the command for a line; return what went wrong, or an empty text."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it, and it is killed with all that it started
            )
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        with suppress(subprocess.TimeoutExpired):
            process.communicate(line.encode(), LIMIT_SECONDS)
            return f"exited with status {process.returncode}" if process.returncode else ""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"killed after {LIMIT_SECONDS:g} s"
