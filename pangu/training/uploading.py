"""Copies of a run's checkpoints at `checkpoint.remote`: sent by a thread of each rank, fetched by all together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread

from pangu.checkpoint.files import list_checkpoints, list_with_status
from pangu.checkpoint.remote import DAMAGED, RemoteRun
from pangu.checkpoint.status import CheckpointStatus
from pangu.collectives.agreement import agree_on_long_work
from pangu.common.errors import UserError
from pangu.config.checkpoint import CheckpointConfig
from pangu.config.schema import RunConfig
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

LOOK_SECONDS = 1.0
"""Shortest interval between two looks for the files of other ranks; it doubles up to `MOST_SECONDS`."""
MOST_SECONDS = 64.0


class Uploader:
    """Thread that sends checkpoints; training waits for it at the end of the run only.

    Every rank sends the files that it wrote. The first one writes the index when all are there, so that no messages
    between ranks are needed, and what an earlier process left unfinished is finished in the same way.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, mesh: Mesh) -> None:
        """Start the thread for the checkpoints in `folder`."""
        self._config, self._folder, self._mesh = config, folder, mesh
        self.failed = 0
        """Failed attempts in a row on this rank, at most one for each save."""
        self._progress = 0
        self._abandoned: int | None = None
        """Step after which the checkpoints are to be set aside."""
        self._done: dict[str, tuple[float, ...]] = {}
        """Times of the index and status of each checkpoint that is sent."""
        self._asked, self._idle, self._lock, self._ended = Event(), Event(), Lock(), False
        Thread(target=self._work, name="upload", daemon=True).start()

    def wake(self) -> None:
        """Look for checkpoints and statuses to send."""
        with self._lock:
            self._idle.clear()
            self._asked.set()

    def end(self) -> None:
        """End the thread after what it sends now."""
        self._ended = True
        self._asked.set()

    def continue_from(self, step: int) -> None:
        """Set aside what was sent after `step`, before anything else is sent."""
        self._abandoned = step
        self.wake()

    def wait(self, limit_s: float, on_progress: Callable[[], None] | None = None) -> None:
        """Send what is left; give up after `limit_s`, with `on_progress` only after as long without progress."""
        self.wake()
        before, since_s = -1, time.monotonic()
        while not self._idle.wait(0.05) and time.monotonic() - since_s < limit_s:
            if on_progress is not None and self._progress != before:
                before, since_s = self._progress, time.monotonic()
                on_progress()
        if not self._idle.is_set():
            fix = "start the same command again to send the rest"
            words = self._config.remote, limit_s, fix
            log.warning("%s: not everything was sent within %g s; %s", *words, extra={"alert": "failed_upload"})

    def _on_progress(self) -> None:
        self._progress += 1

    def _work(self) -> None:
        delay_s: float | None = None
        while True:
            self._asked.wait(delay_s)
            if self._ended:
                return
            delay_s = LOOK_SECONDS if self._asked.is_set() else min(2 * (delay_s or LOOK_SECONDS), MOST_SECONDS)
            self._asked.clear()
            try:
                is_waiting = self._send_all()
                is_late = is_waiting and delay_s == MOST_SECONDS
                if is_late and not self.failed:
                    late = "%s: files from other ranks have not arrived yet"
                    log.warning(late, self._config.remote, extra={"alert": "failed_upload"})
                self.failed = int(is_late)
            except (UserError, OSError) as error:
                self.failed, is_waiting = self.failed + 1, False
                failed = "%s; training continues, and the next save tries again"
                log.warning(failed, error, extra={"alert": "failed_upload"})
            if not is_waiting:
                delay_s = None
                with self._lock:
                    if not self._asked.is_set():
                        self._idle.set()

    def _send_all(self) -> bool:
        """Send all local checkpoints, newest first; return True if this rank waits for files of others."""
        assert self._config.remote is not None
        remote, mesh = RemoteRun(self._config.remote, self._on_progress), self._mesh
        if self._abandoned is not None and mesh.is_first:
            step = self._abandoned
            remote.send_start(self._folder)
            remote.abandon(step)
            self._abandoned = None if self._abandoned == step else self._abandoned
        problems, is_waiting, has_committed = [], False, False
        for path in reversed(list_checkpoints(self._folder)):
            try:
                times = tuple(file.stat().st_mtime for file in sorted(path.glob("*.json")))
                if self._done.get(path.name) == times:
                    continue
                is_whole = remote.send(path, mesh.rank, mesh.layout.world)
                if mesh.is_first and is_whole:
                    remote.commit(path)
                    has_committed = True
                    if path.name not in self._done:
                        log.info("%-12s %s to %s", "copied", path.name, remote.url)
                if mesh.is_first and not is_whole:
                    is_waiting = True
                else:
                    self._done[path.name] = times
            except FileNotFoundError:
                continue  # it was too old and is gone
            except UserError as error:
                if path.is_dir():
                    problems.append(error)
        if has_committed:
            remote.prune(self._folder, self._config)
        if problems:
            raise problems[0]
        return is_waiting


def all_checkpoints(config: RunConfig, is_running: bool) -> tuple[list[tuple[Path, CheckpointStatus]], dict[Path, str]]:
    """Return a run's checkpoints with their statuses, oldest first, and the remote names of those that are copied.

    The paths are those in the run folder, also of checkpoints that are at `checkpoint.remote` only. Raises UserError if
    that does not answer, which is a warning to a run that `is_running`.
    """
    folder = Path(config.train.output) / "checkpoints"
    found, copies = dict(list_with_status(folder)), {}
    if config.checkpoint.remote is not None:
        try:
            remote = RemoteRun(config.checkpoint.remote)
            copies = {folder / name[:13]: name for name in remote.checkpoints()}
            found |= dict(remote.statuses(list(copies.values()), folder))
        except UserError as error:
            if not is_running:
                raise UserError(f"{error}, or set checkpoint.remote=null to continue from {folder} only") from error
            log.warning("%s; only checkpoints in %s are considered", error, folder)
    return sorted(found.items()), copies


def fetch(name: str, path: Path, config: CheckpointConfig, mesh: Mesh) -> list[str]:
    """Fetch a remote checkpoint into the run folder, each rank its share of the files; return its damage.

    Raises UserError on all ranks for anything else: a newer checkpoint must not be given up because of the network.
    """
    assert config.remote is not None
    url, doing, first = config.remote, f"fetching {path.name} from {config.remote}", mesh.is_first
    share = mesh.rank, mesh.layout.world
    log.info("%s", doing)
    try:
        agree_on_long_work(mesh, doing, lambda report: RemoteRun(url, report).fetch_index(name, path), runs_here=first)
        agree_on_long_work(mesh, doing, lambda report: RemoteRun(url, report).fetch(name, path, *share), runs_here=True)
        agree_on_long_work(mesh, doing, lambda report: RemoteRun(url, report).finish(path), runs_here=first)
    except UserError as error:
        if DAMAGED not in str(error):
            raise
        return [str(error)]
    return []
