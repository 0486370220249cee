"""Processes of a run: places of the ranks, lock on the run folder, heartbeat and signals."""

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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pangu.common.errors import LAUNCHER_SECONDS, UserError, writing
from pangu.common.files import open_regular, write_atomically
from pangu.metrics.devices import device_name
from pangu.topology.launch import MEMBER
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

LOCK_BYTES = 200
"""Length read from run.lock: the name of a machine and a process id."""
STEPS_UNTIL_STOP = 3
"""Steps that end before a run can stop because of time: this one, the next, which raises the flags, and the one after
it, in which they are read."""
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that save and stop a run: of a scheduler, of a terminal that is closed, and Ctrl-C."""
HEARTBEAT_SECONDS = 1.0
"""Shortest interval between heartbeats, unless the run starts to do something else."""


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Hold `run.lock`, which names its holder, in a run folder; raises UserError if another process holds it.

    The system releases it however the process ends, on network file systems too, so nobody must delete it after a
    crash. A process that its launchers have given up (`topology.supervisor`) loses it: it may be stopped, and not be
    killed before it continues.
    """
    path, launcher = output / "run.lock", ""
    if MEMBER in os.environ:
        launcher = f", launcher {os.environ['TORCHELASTIC_RUN_ID']}"
    with writing(path):
        file = open_regular(path, "a+b")
    with file:
        file.seek(0)
        holder = file.read(LOCK_BYTES).decode(errors="replace")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in (errno.EACCES, errno.EAGAIN)
            if is_held and launcher and f"{launcher}," in holder:
                path.unlink()
                with only_run(output):
                    yield
                return
            if is_held:
                message = f"train.output = {output}: another run uses this folder ({holder}); stop it, or set another"
                raise UserError(f"{message} train.output") from error
            log.warning("%s: this file system has no locks (%s); make sure no other run uses the folder", path, error)
        if holder:
            log.info("the last run in this folder (%s) was killed", holder)
        file.truncate(0)
        file.write(f"{socket.gethostname()}{launcher}, process {os.getpid()}".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


class Heartbeat:
    """Writer of `heartbeat.json` in the run folder: step, activity, counts of failures, time (UTC), host, process.

    It is written as training proceeds, not by a thread of its own, so that a hanging run falls silent. The end of this
    context manager writes `ended`, or `failed` after an error. Failures to write are a warning.
    """

    def __init__(self, folder: Path | None) -> None:
        """Write into `folder`; None: write nothing."""
        self._path = None if folder is None else folder / "heartbeat.json"
        self._step = 0
        self._doing = ""
        self._written_s = -HEARTBEAT_SECONDS
        self._failing = False
        self.counts: Mapping[str, float | str] = {"failed_saves": 0}
        """Counts of failures so far, by name, and the last fault of a device."""

    def beat(self, step: int, doing: str) -> None:
        """Record that the run is alive, having made `step` steps."""
        now = time.monotonic()
        self._step = step
        if self._path is None or (doing == self._doing and now - self._written_s < HEARTBEAT_SECONDS):
            return
        self._doing, self._written_s = doing, now
        content = {
            "step": step,
            "doing": doing,
            **self.counts,
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
                log.warning("%s; the run continues", error)
            self._failing = True

    def __enter__(self) -> Self:
        """Write the first heartbeat."""
        self.beat(0, "starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write the last heartbeat."""
        self.beat(self._step, "ended" if kind is None else "failed")


def describe_rank(mesh: Mesh, local_rank: int) -> dict[str, Any]:
    """Return where this rank runs, and its place in the layout."""
    device = str(mesh.device) if mesh.device.type == "cpu" else f"{mesh.device}, {device_name(mesh.device)}"
    place = {"rank": mesh.rank, "host": socket.gethostname(), "local_rank": local_rank, "process": os.getpid()}
    return {**place, "device": device, **asdict(mesh.at)}


def save_nodes(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write nodes.json, a JSON array with one line for each rank. Raises UserError."""
    lines = ",\n".join(map(json.dumps, ranks))
    with writing(folder):
        write_atomically(folder / "nodes.json", f"[\n{lines}\n]\n".encode())


def read_flags(flags: Sequence[bool]) -> tuple[bool, str | None, bool]:
    """Return what the flags of `StopSignals` that any rank raised ask for after a step.

    Returns:
        Whether to save a checkpoint now, the reason to stop after that (None: continue), and whether to read the result
        of the last save, which has failed on some rank.
    """
    save, *stops, settle = flags
    reasons = [*(number.name for number in STOPS), "train.stop_after"]
    stop = next((reason for reason, is_asked in zip(reasons, stops, strict=True) if is_asked), None)
    return save or stop is not None, stop, settle


class StopSignals:
    """Handler of signals: `STOPS` save and stop, SIGUSR1 saves; a time limit saves and stops before it is over.

    Use it as a context manager. A signal to one process is enough. SIGHUP and SIGINT stay ignored where the parent of
    the process ignores them (`nohup`, a shell's background).
    """

    def __init__(
        self, began: float, limit_s: float | None, received: set[int] | None = None, keep: ExitStack | None = None
    ) -> None:
        """Prepare; `began`: `time.perf_counter()` at the start; `limit_s`: seconds since then, None: no limit.

        `received`: signals that an earlier attempt of this process has received; it keeps those of this one. `keep`:
        keeps the handlers when this attempt fails.
        """
        self.began = began
        self._deadline = None if limit_s is None else began + limit_s
        self._received = set[int]() if received is None else received
        self._handlers: dict[int, Any] = {}
        self._keep = keep

    def flags(self, step_s: float, save_has_failed: bool) -> list[bool]:
        """Return this rank's new requests: save, each stop reason, read a failed save. `step_s`: time of a step."""
        late = self._deadline is not None and time.perf_counter() + STEPS_UNTIL_STOP * step_s > self._deadline
        stops = [number in self._received for number in STOPS]
        flags = [signal.SIGUSR1 in self._received, *stops, late, save_has_failed]
        self._received.discard(signal.SIGUSR1)
        return flags

    def linger(self) -> None:
        """Wait a moment if SIGTERM went to other processes only.

        A launcher that restarts because others join takes a process that has ended by itself for a complete run.
        """
        if signal.SIGTERM not in self._received:
            time.sleep(LAUNCHER_SECONDS)

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in (*STOPS, signal.SIGUSR1):
            is_ignored = number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) is signal.SIG_IGN
            if not is_ignored:
                self._handlers[number] = signal.signal(number, lambda number, _: self._received.add(number))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the previous handlers, now or when `keep` ends."""
        if kind is not None and self._keep is not None:
            self._keep.callback(self._restore)
        else:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
