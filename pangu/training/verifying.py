"""Search for bit rot: a thread reads old checkpoints again, slowly, and compares their checksums."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, get_native_id

from pangu.checkpoint.files import list_checkpoints
from pangu.checkpoint.index import read_index
from pangu.common.errors import UserError, writing
from pangu.common.files import open_regular, read_json_object, write_atomically

log = logging.getLogger("pangu")

FILE = "verified.json"
"""File next to the checkpoints: name -> time of its last verification, in seconds since 1970."""
LOOK_SECONDS = 60.0
"""Interval between searches for checkpoints that are due."""
CHUNK_BYTES = 8 * 2**20
REST = 3.0
"""Pause after each chunk, relative to the time that it took: reading takes a quarter of a thread at most."""
LOWEST_PRIORITY = 19


class Verifier:
    """Thread of the first rank that verifies each checkpoint of a run once every `hours`."""

    def __init__(self, folder: Path, hours: float) -> None:
        """Start the thread for the checkpoints in `folder`."""
        self._folder, self._period_s = folder, 3600 * hours
        self.damaged: dict[str, str] = {}
        """Damaged checkpoints by name, and their damage."""
        self._ended = Event()
        Thread(target=self._work, name="verify", daemon=True).start()

    def end(self) -> None:
        """End the thread after the checkpoint that it reads now."""
        self._ended.set()

    def _work(self) -> None:
        with suppress(OSError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, get_native_id(), LOWEST_PRIORITY)
        while not self._ended.is_set():
            self.verify_due()
            self._ended.wait(LOOK_SECONDS)

    def verify_due(self) -> None:
        """Verify the checkpoints that are due, oldest first, and name those that are damaged."""
        times = self._times()
        for path in list_checkpoints(self._folder):
            if self._ended.is_set():
                return
            try:
                last = max(times.get(path.name, 0.0), (path / "index.json").stat().st_mtime)
                if time.time() - last < self._period_s:
                    continue
                damage = _damage(path)
            except FileNotFoundError:
                damage = "index.json is missing"
            if not path.is_dir():
                continue  # it was too old and is gone
            if damage:
                self._name(path, damage)
            else:
                self.damaged.pop(path.name, None)
            times[path.name] = time.time()
            self._write(times)

    def _name(self, path: Path, damage: str) -> None:
        self.damaged[path.name] = damage
        message = "%s: bit rot: %s; the disk may be failing. A restart skips it, or replaces it with its copy"
        log.error(message, path, damage, extra={"alert": "damaged_checkpoint"})

    def _times(self) -> dict[str, float]:
        try:
            found = read_json_object(self._folder / FILE) if (self._folder / FILE).exists() else {}
        except UserError:
            return {}
        return {name: float(value) for name, value in found.items() if type(value) in (int, float)}

    def _write(self, times: Mapping[str, float]) -> None:
        content = {name: value for name, value in times.items() if (self._folder / name).is_dir()}
        try:
            with writing(self._folder / FILE):
                write_atomically(self._folder / FILE, json.dumps(content).encode(), sync=False)
        except UserError as error:
            log.warning("%s; checkpoints are verified again after a restart", error)


def _damage(path: Path) -> str:
    """Return the damage of a checkpoint, or an empty text. Raises FileNotFoundError if its index is missing."""
    try:
        files = read_index(path)["files"]
    except UserError as error:
        return str(error)
    for name, entry in sorted(files.items()):
        try:
            digest, size = _read_slowly(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except UserError as error:
            return str(error)
        if (size, digest) != (entry["bytes"], entry["sha256"]):
            return f"{name} differs from what was written ({size} of {entry['bytes']} bytes, SHA-256 {digest})"
    return ""


def _read_slowly(file: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file, from the disk rather than from memory, and its size."""
    digest, size = hashlib.sha256(), 0
    with open_regular(file, "rb", buffering=0) as opened:
        with suppress(AttributeError, OSError):  # pages that memory still holds hide what the disk has become
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while True:
            began = time.perf_counter()
            chunk = opened.read(CHUNK_BYTES)
            if not chunk:
                return digest.hexdigest(), size
            digest.update(chunk)
            size += len(chunk)
            time.sleep(REST * (time.perf_counter() - began))
