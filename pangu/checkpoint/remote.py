"""Copy of a run in an object store, over fsspec. It is trusted like a checkpoint: only as far as it is checked.

    URL/config.yaml, metrics.jsonl, ...
    URL/checkpoints/step-00000100-0123456789abcdef/    step, and the start of a digest of its files' digests
        tensors-00000-00000.safetensors, ...
        standing.json
        index.json                                     written last: a folder without it is no checkpoint

A step that is made again with other results gets another folder, so that a file with the right name and size in a
folder is whole: an upload that was interrupted continues without sending it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pangu.checkpoint.files import adopt, partial_of, start, step_of, superseded
from pangu.checkpoint.index import START, NewerFormatError, read_index
from pangu.checkpoint.status import FILE, CheckpointStatus, parse_status, read_status
from pangu.common.errors import UserError, reading, writing
from pangu.common.files import new_path, open_regular
from pangu.config.checkpoint import CheckpointConfig
from pangu.data.finding import file_system

_log = logging.getLogger("pangu")

DAMAGED = ": damaged: "
"""Part of the messages of errors that another attempt would meet again."""
CHUNK_BYTES = 8 * 2**20
MOST_INDEX_BYTES = 2**30
"""Largest index.json; one of a trillion parameters on thousands of ranks has some ten MB."""
MOST_STANDING_BYTES = 2**20
RUN_FILES = (
    *("config.yaml", "metrics.jsonl", "nodes.json", "summary.json", "chat_template.jinja", "transformers.json"),
    *("wandb/run-id", "tokenizer.model", "tokenizer/*", f"checkpoints/{START}"),
)
"""Files of a run folder that are copied with each checkpoint."""
ASIDE = "index.aside.json"
"""Index of a checkpoint that its run does not continue from."""
CONTINUED = ("metrics.jsonl", "wandb/run-id")
"""Files among them that a run on another machine continues; it makes the others again."""
_NAME = re.compile(r"step-[0-9]{8}-[0-9a-f]{16}")


def remote_name(path: Path, index: Mapping[str, Any]) -> str:
    """Return the name of the remote folder of a checkpoint."""
    digest = hashlib.sha256(json.dumps(index["files"], sort_keys=True).encode()).hexdigest()
    return f"{path.name}-{digest[:16]}"


class RemoteRun:
    """Remote copy of a run folder. All methods raise UserError where the store does not do what they ask."""

    def __init__(self, url: str, on_progress: Callable[[], None] = lambda: None) -> None:
        """Open `url`; `on_progress` is called for each chunk that was sent or received."""
        self.url, self._on_progress = url, on_progress
        with self._talking():
            self._system, self._root = file_system(url)

    def checkpoints(self, committed: bool = True) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each remote folder, oldest step first; those with an index, or all."""
        names = sorted(filter(_NAME.fullmatch, self._listing("checkpoints")))
        found = {name: self._listing(f"checkpoints/{name}") for name in names}
        return {name: files for name, files in found.items() if not committed or "index.json" in files}

    def statuses(self, names: Sequence[str], local: Path) -> list[tuple[Path, CheckpointStatus]]:
        """Return the local paths of remote checkpoints with their statuses: the local ones, where there are any."""
        found = []
        for name in names:
            path = local / name[:13]
            if path.is_dir():
                found.append((path, read_status(path)))
                continue
            with self._talking():
                try:
                    text = self._system.cat_file(self._path(name, FILE), end=MOST_STANDING_BYTES)
                except FileNotFoundError:
                    text = b"{}"
            found.append((path, parse_status(text)))
        return found

    def send(self, path: Path, share: int, shares: int) -> bool:
        """Send this rank's share of a local checkpoint's files; return True if all files of all ranks are there."""
        index = read_index(path)
        name = remote_name(path, index)
        sizes = self._listing(f"checkpoints/{name}")
        for file, entry in sorted(index["files"].items()):
            # the rank that wrote a file sends it; with fewer ranks than then, one sends those of several
            if int(file.split("-")[1]) % shares == share and sizes.get(file) != entry["bytes"]:
                self._send_file(path / file, self._path(name, file), entry)
                sizes[file] = entry["bytes"]
        return all(sizes.get(file) == entry["bytes"] for file, entry in index["files"].items())

    def commit(self, path: Path) -> None:
        """Send the small files of a run and of a checkpoint, the index last, and drop other results of its step."""
        name, run = remote_name(path, read_index(path)), path.parent.parent
        for file in (file for pattern in RUN_FILES for file in sorted(run.glob(pattern))):
            if file.is_file() and not any(path.is_symlink() for path in {file, file.parent} - {run}):
                self._send_file(file, f"{self._root}/{file.relative_to(run)}")
        for last in (FILE, "index.json"):
            if (path / last).exists():
                self._send_file(path / last, self._path(name, last))
        others = (other for other in self.checkpoints() if other[:13] == name[:13] and other != name)
        self.delete(list(others))

    def send_start(self, local: Path) -> None:
        """Send the facts of a run that went back to its beginning, if it did; no checkpoint may ever follow them."""
        if (local / START).exists():
            self._send_file(local / START, f"{self._root}/checkpoints/{START}")

    def fetch_start(self, local: Path) -> None:
        """Fetch what `send_start` has sent, unless it is there."""
        target, source = local / START, f"{self._root}/checkpoints/{START}"
        if not target.exists() and self._size(source) is not None:
            self._fetch_new(source, target, MOST_INDEX_BYTES)

    def delete(self, names: Iterable[str]) -> None:
        """Delete remote checkpoints, their index first: one that is cut short leaves no damaged checkpoint."""
        for name in names:
            with self._talking():
                if self._size(self._path(name, "index.json")) is not None:
                    self._system.rm_file(self._path(name, "index.json"))
                self._system.rm(f"{self._root}/checkpoints/{name}", recursive=True)

    def prune(self, local: Path, config: CheckpointConfig) -> None:
        """Delete checkpoints like `files.prune`, and what interrupted uploads of earlier steps have left."""
        listed = self.checkpoints(committed=False)
        names = [name for name, files in listed.items() if "index.json" in files]
        statuses = self.statuses(names, local) if config.keep else []
        old = {path.name for path in superseded(statuses, config)}
        left = [
            name for name in listed if name < max(names, default="") and not {"index.json", ASIDE} & {*listed[name]}
        ]
        self.delete(name for name in names if name[:13] in old)
        self.delete(name for name in left if not (local / name[:13]).is_dir())

    def abandon(self, step: int) -> None:
        """Rename the index of each checkpoint after `step`, from which the run does not continue; nothing lists it."""
        for name in (name for name in self.checkpoints() if step_of(Path(name[:13])) > step):
            with self._talking():
                self._system.mv(self._path(name, "index.json"), self._path(name, ASIDE))
            _log.warning("%s/checkpoints/%s: set aside; delete it if you do not need it", self.url, name)

    def fetch_index(self, name: str, path: Path) -> None:
        """Start the local checkpoint `path` with the index and the status of a remote one, checked."""
        start(path)
        partial = partial_of(path)
        self._fetch_file(self._path(name, "index.json"), partial / "index.json", MOST_INDEX_BYTES)
        try:
            index = read_index(partial)
        except NewerFormatError:
            raise
        except UserError as error:
            raise UserError(f"{self.url}/checkpoints/{name}{DAMAGED}{error}") from error
        if remote_name(path, index) != name:
            raise UserError(f"{self.url}/checkpoints/{name}{DAMAGED}its index belongs to another checkpoint")
        if self._size(self._path(name, FILE)) is not None:
            self._fetch_file(self._path(name, FILE), partial / FILE, MOST_STANDING_BYTES)

    def fetch(self, name: str, path: Path, share: int, shares: int) -> None:
        """Fetch this rank's share of the files of a remote checkpoint that `fetch_index` has started."""
        files = read_index(partial_of(path))["files"]
        for file in sorted(files)[share::shares]:
            self._fetch_file(self._path(name, file), partial_of(path) / file, files[file]["bytes"], files[file])

    def finish(self, path: Path) -> None:
        """Fetch what the run continues besides a checkpoint that was fetched, then make that the local one."""
        for name in CONTINUED:
            target, source = path.parent.parent / name, f"{self._root}/{name}"
            # the longer one: a machine that trained before has the figures up to there
            if (self._size(source) or 0) > (target.stat().st_size if target.exists() else 0):
                self._fetch_new(source, target)
        adopt(path)

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/checkpoints/{name}/{file}"

    def _talking(self) -> AbstractContextManager[None]:
        fix = "check the URL, the credentials, the network and the free space there"
        return reading(self.url, Exception, rule="checkpoint.remote cannot be used", fix=fix)

    def _listing(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files and folders in a folder. `find` would leave out what it cannot read."""
        with self._talking():
            self._system.invalidate_cache()
            try:
                found = self._system.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
            return {info["name"].rstrip("/").rpartition("/")[2]: info.get("size") or 0 for info in found}

    def _size(self, path: str) -> int | None:
        """Return the size of a file; None: it is missing. `exists` would call that any error."""
        with self._talking():
            try:
                return int(self._system.info(path)["size"])
            except FileNotFoundError:
                return None

    def _send_file(self, source: Path, target: str, expected: Mapping[str, Any] | None = None) -> None:
        """Send a file; raise UserError unless it is as `expected` (bytes, sha256), here and there.

        An object replaces another one when it is complete. A file system would have half a file, or none, if its disk
        is full or this process is killed, so that a file gets its name last there.
        """
        digest, sent = hashlib.sha256(), 0
        is_local = getattr(self._system, "local_file", False)
        partial = f"{target}.partial" if is_local else target
        with open_regular(source, "rb") as file, self._talking():
            if is_local:  # others need no folders, and would make a bucket
                self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            with self._system.open(partial, "wb") as opened:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    opened.write(chunk)
                    sent += len(chunk)
                    self._on_progress()
            self._system.invalidate_cache()
            arrived = self._system.info(partial)["size"]
            if expected is not None and digest.hexdigest() != expected["sha256"]:
                self._system.rm_file(partial)
            elif is_local and arrived == sent:
                self._system.mv(partial, target)
        if expected is not None:
            _require_same(source, digest.hexdigest(), sent, expected)
        if arrived != sent:
            raise UserError(f"{self.url}: {target} has {arrived} bytes after {sent} were sent")

    def _fetch_new(self, source: str, target: Path, most: int | None = None) -> None:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_path(target) as partial:
                self._fetch_file(source, partial, most)

    def _fetch_file(
        self, source: str, target: Path, most: int | None = None, expected: Mapping[str, Any] | None = None
    ) -> None:
        digest, received = hashlib.sha256(), 0
        # two blocks, so that a full disk and a failing store are distinguished
        with reading(target, rule="cannot be written"), target.open("xb") as file:
            if self._size(source) is None:
                raise UserError(f"{self.url}: {source}{DAMAGED}it is missing")
            with self._talking():
                opened = self._system.open(source, "rb")
            with opened:
                while True:
                    with self._talking():
                        chunk = opened.read(CHUNK_BYTES)
                    received += len(chunk)
                    if not chunk or (most is not None and received > most):
                        break
                    digest.update(chunk)
                    file.write(chunk)
                    self._on_progress()
        if expected is not None:
            _require_same(f"{self.url}: {source}", digest.hexdigest(), received, expected)
        elif most is not None and received > most:
            raise UserError(f"{self.url}: {source}{DAMAGED}it has more than {most:,} bytes")


def _require_same(name: object, digest: str, size: int, expected: Mapping[str, Any]) -> None:
    if size != expected["bytes"]:
        raise UserError(f"{name}{DAMAGED}its size is not the {expected['bytes']} bytes that were written")
    if digest != expected["sha256"]:
        raise UserError(f"{name}{DAMAGED}its SHA-256 is {digest}, but {expected['sha256']} was written")
