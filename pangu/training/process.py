"""The run as processes: which rank runs where, the lock on its folder, its heartbeat, and the signals that it obeys."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from pangu.config.errors import LAUNCHER_SECONDS, UserError, writing
from pangu.config.files import open_regular, write_atomically
from pangu.metrics.devices import device_name
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

LOCK_BYTES = 200
"""Read of what run.lock says: a name of a machine and a number."""
STEPS_UNTIL_STOP = 3
"""Steps that end before a run stops whose flags did not yet ask for that: this one, the next, which raises them, and
the one after it, in which they are heard of."""
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that save and stop a run: of a scheduler, of a terminal that is closed, and Ctrl-C."""
HEARTBEAT_SECONDS = 1.0
"""The heartbeat is not written more often than that, unless the run does something else."""


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Hold `run.lock` in a run folder, which says who holds it. The system lets go of it when the process ends, however
    it ends, on network file systems too, so that nobody has to delete it after a crash. Raises UserError
    if another process holds it, or the folder cannot be written."""
    path = output / "run.lock"
    with writing(path):
        file = open_regular(path, "a+b")
    with file:
        file.seek(0)
        holder = file.read(LOCK_BYTES).decode(errors="replace")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"{output}: another run works in this folder ({holder}); end it or choose another"
                raise UserError(f"{message} train.output") from error
            log.warning("%s: this file system has no locks (%s): see to it that no other run uses it", path, error)
        if holder:
            log.info("the last run in this folder (%s) was killed", holder)
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


class Heartbeat:
    """`heartbeat.json` in the run folder: step, what the run is doing, saves in a row that have failed, time (UTC),
    host, process. Written as training goes on, not by a thread of its own, so that a run that hangs falls silent.

    A context manager, whose end writes `ended`, or `failed` with an error. None as folder: writes nothing. A file that
    cannot be written is a warning, once until it can be: the run is worth more than its heartbeat.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "heartbeat.json"
        self._step = 0
        self._doing = ""
        self._written_s = -HEARTBEAT_SECONDS
        self._failing = False
        self.failed_saves = 0

    def beat(self, step: int, doing: str) -> None:
        """Say that the run is alive, having made `step` steps."""
        now = time.monotonic()
        self._step = step
        if self._path is None or (doing == self._doing and now - self._written_s < HEARTBEAT_SECONDS):
            return
        self._doing, self._written_s = doing, now
        content = {
            "step": step,
            "doing": doing,
            "failed_saves": self.failed_saves,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "process": os.getpid(),
        }
        try:
            with writing(self._path):
                # a watcher never finds half of it; it need not outlive a crash of the machine
                write_atomically(self._path, f"{json.dumps(content)}\n".encode(), sync=False)
            self._failing = False
        except UserError as error:
            if not self._failing:
                log.warning("%s; the run goes on", error)
            self._failing = True

    def __enter__(self) -> Self:
        self.beat(0, "starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.beat(self._step, "ended" if kind is None else "failed")


def describe_rank(mesh: Mesh, local_rank: int) -> dict[str, Any]:
    """Where this rank runs, and which part of the layout it has."""
    device = str(mesh.device) if mesh.device.type == "cpu" else f"{mesh.device}, {device_name(mesh.device)}"
    place = {"rank": mesh.rank, "host": socket.gethostname(), "local_rank": local_rank, "process": os.getpid()}
    return {**place, "device": device, **asdict(mesh.at)}


def save_nodes(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write nodes.json, a JSON array with one line for each rank. Raises UserError."""
    lines = ",\n".join(map(json.dumps, ranks))
    with writing(folder):
        write_atomically(folder / "nodes.json", f"[\n{lines}\n]\n".encode())


@dataclass(frozen=True)
class Request:
    """What all ranks do after a step."""

    save: bool
    """Save a checkpoint now."""
    stop: str | None
    """Why the run ends here, after saving; None: it goes on."""
    settle: bool
    """The last save has failed on some rank: hear now how it ended."""

    @classmethod
    def of(cls, flags: Sequence[bool]) -> Self:
        """Return what the flags (`StopSignals.flags`) of any rank ask for."""
        save, *stops, settle = flags
        reasons = [*(number.name for number in STOPS), "train.stop_after"]
        stop = next((reason for reason, is_asked in zip(reasons, stops, strict=True) if is_asked), None)
        return cls(save or stop is not None, stop, settle)


class StopSignals:
    """Signals that a run obeys: `STOPS` save and stop, SIGUSR1 saves; a time limit saves and stops before it is over.

    A context manager, in whose block the signals have these meanings. A signal to one process is enough. SIGHUP and
    SIGINT stay ignored where whoever started the process ignores them (`nohup`, a shell's background).
    """

    def __init__(self, began: float, limit_s: float | None) -> None:
        """`began`: `time.perf_counter()` when the run was started; `limit_s`: seconds from then on, None: no limit."""
        self._deadline = None if limit_s is None else began + limit_s
        self._received: set[int] = set()
        self._handlers: dict[int, Any] = {}

    def flags(self, step_s: float, save_has_failed: bool) -> list[bool]:
        """Return what this rank was told to do, once: to save, to stop by one of `STOPS` or in time, and to hear how a
        save ended. `step_s`: seconds of a step."""
        late = self._deadline is not None and time.perf_counter() + STEPS_UNTIL_STOP * step_s > self._deadline
        stops = [number in self._received for number in STOPS]
        flags = [signal.SIGUSR1 in self._received, *stops, late, save_has_failed]
        self._received.discard(signal.SIGUSR1)
        return flags

    def linger(self) -> None:
        """Wait a little where SIGTERM was sent to other processes only. A launcher that ends its process because others
        join the run takes one that has ended by itself before for a run that is complete."""
        if signal.SIGTERM not in self._received:
            time.sleep(LAUNCHER_SECONDS)

    def __enter__(self) -> Self:
        for number in (*STOPS, signal.SIGUSR1):
            is_ignored = number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) is signal.SIG_IGN
            if not is_ignored:
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received.add(number)
