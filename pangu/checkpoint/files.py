"""Checkpoint files in logical space: safetensors and a JSON index with checksums, committed by one atomic rename.

    checkpoints/step-00000100/
        index.json                            facts of the run; global shape, dtype and pieces of every tensor
        tensors-00000-00000.safetensors, ...  writer, number of the file
        standing.json                         when it was saved, proven or condemned (`status.py`); may be absent

A tensor is called `KIND/NAME`: KIND is `weight` (the fp32 master) or a name of the optimizer's state, NAME the global
name of the logical tensor. Nothing in a checkpoint depends on the layout that wrote it, and loading one runs no code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pangu.checkpoint.safetensors_file import write_safetensors
from pangu.checkpoint.status import CheckpointStatus, indispensable, read_status
from pangu.common.errors import reading
from pangu.common.files import flush, write_atomically
from pangu.config.checkpoint import CheckpointConfig

log = logging.getLogger("pangu")

FORMAT = "pangu-checkpoint"
VERSION = 3
FILE_BYTES = 2**30
"""Approximate size of a file in bytes, which bounds the host memory of a save."""


_NAME = re.compile(r"step-[0-9]{8}")


@dataclass(frozen=True)
class Slice:
    """Rectangle of a logical tensor."""

    tensor: Tensor
    """Values of the rectangle, or memory for them."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Global index of the first element of `tensor`."""


@dataclass(frozen=True)
class Written:
    """Index entries for the tensors and files that one process wrote."""

    tensors: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint was written after."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first, damaged ones included, partial ones and links excluded."""
    named = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def list_with_status(folder: Path) -> list[tuple[Path, CheckpointStatus]]:
    """Return the checkpoints of `list_checkpoints` with their statuses."""
    return [(path, read_status(path)) for path in list_checkpoints(folder)]


def start(path: Path) -> None:
    """Create the empty folder of an uncommitted checkpoint next to `path`. Raises UserError."""
    partial = partial_of(path)
    with _saving(path):
        if partial.is_symlink():
            partial.unlink()  # not ours: rmtree refuses links
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write_slices(
    path: Path, writer: int, slices: Iterable[tuple[str, Slice]], contents: Iterator[Tensor] | None = None
) -> Written:
    """Write slices of logical tensors into the started checkpoint `path`. Raises UserError if the disk refuses.

    `writer`: number that no other process of this save uses. `slices`: (`KIND/NAME`, slice) pairs; no element may be
    written twice. `contents`: their values, one at a time, if the slices are on the meta device.
    """
    written = Written()
    with _saving(path):
        for batch in _batches(slices):
            tensors = itertools.islice(contents, len(batch)) if contents else (part.tensor for _, part in batch)
            _write_file(partial_of(path), writer, batch, tensors, written)
    return written


def _batches(slices: Iterable[tuple[str, Slice]]) -> Iterator[list[tuple[str, Slice]]]:
    batch: list[tuple[str, Slice]] = []
    size = 0
    for named in slices:
        batch.append(named)
        size += named[1].tensor.nbytes
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def commit(path: Path, parts: Sequence[Written], facts: Mapping[str, Any]) -> None:
    """Write the index of all writers' tensors with `facts` of the run, and commit the checkpoint; raises UserError."""
    index: dict[str, Any] = {"format": FORMAT, "version": VERSION, **facts, "tensors": {}, "files": {}}
    for part in parts:
        index["files"] |= part.files
        for name, entry in part.tensors.items():
            index["tensors"].setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    with _saving(path):
        _write_index(partial_of(path), index)
    adopt(path)


def adopt(path: Path) -> None:
    """Name a started checkpoint whose files are all written, in place of any of that name; raises UserError."""
    with _saving(path):
        if path.exists():
            _delete(path)
        partial_of(path).rename(path)
        flush(path.parent)


def amend(path: Path, index: Mapping[str, Any]) -> None:
    """Atomically replace the index of a committed checkpoint. Raises UserError."""
    with _saving(path):
        _write_index(path, index)


def prune(folder: Path, config: CheckpointConfig) -> None:
    """Delete the checkpoints that are `superseded`; log a warning for each that cannot be deleted."""
    for path in superseded(list_with_status(folder) if config.keep else [], config):
        try:
            _delete(path)
        except OSError as error:
            log.warning("%s: cannot be deleted (%s)", path, error.strerror)


def superseded(checkpoints: Sequence[tuple[Path, CheckpointStatus]], config: CheckpointConfig) -> list[Path]:
    """Return the checkpoints to delete, of all from the oldest to the newest, so that `keep` are left (0: all).

    Those of `keep_every` stay and do not count; those of `keep_every_hours` and `keep_best`, and those a rollback may
    need (`status.indispensable`), stay too.
    """
    passing = [path for path, _ in checkpoints if not config.keep_every or step_of(path) % config.keep_every]
    believed = [(path, status) for path, status in checkpoints if not status.condemned]
    first_of_period: dict[float, Path] = {}
    for path, status in believed:
        if config.keep_every_hours is not None and status.saved_s is not None:
            first_of_period.setdefault(status.saved_s // (3600 * config.keep_every_hours), path)
    losses = [(one.validation_loss, path) for path, one in believed if one.validation_loss is not None]
    best = [path for _, path in sorted(losses)[: config.keep_best]]
    needed = indispensable(checkpoints) | {*best, *first_of_period.values()}
    return [path for path in passing[: -config.keep] if path not in needed] if config.keep else []


def tidy(folder: Path, step: int) -> list[Path]:
    """Make the checkpoint of `step` the newest (-1: none) and return the new names of later ones, which nothing lists.

    Later checkpoints are damaged, condemned or of an abandoned course; partial ones of killed processes are deleted.
    """
    for pattern in (partial_of(Path("step-????????")).name, _to_delete(Path("step-????????")).name):
        for rest in folder.glob(pattern):
            shutil.rmtree(rest, ignore_errors=True)
    aside = []
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            aside.append(path.with_name(f"{path.name}.aside"))
            with _saving(path):
                shutil.rmtree(aside[-1], ignore_errors=True)
                path.rename(aside[-1])
    return aside


def partial_of(path: Path) -> Path:
    """Return the folder of the uncommitted checkpoint `path`."""
    return path.with_name(f".{path.name}.partial")


def _to_delete(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _delete(path: Path) -> None:
    # renamed first: a deletion that is cut short must not leave a damaged checkpoint behind
    path.rename(_to_delete(path))
    shutil.rmtree(_to_delete(path), ignore_errors=True)


def _saving(path: Path) -> AbstractContextManager[None]:
    fix = (
        "older checkpoints are intact. Free disk space, or fix the permissions or the file size limit (ulimit -f), "
        "then start the same command again to continue from the newest one"
    )
    return reading(path, rule="the checkpoint could not be written", fix=fix)


def _write_file(
    folder: Path, writer: int, batch: Sequence[tuple[str, Slice]], contents: Iterable[Tensor], written: Written
) -> None:
    path = folder / f"tensors-{writer:05d}-{len(written.files):05d}.safetensors"
    described: dict[str, Tensor] = {}
    for name, part in batch:
        key = f"{name}@{','.join(map(str, part.offsets))}"
        assert key not in described, f"{key} is written twice"
        described[key] = part.tensor
        shape, dtype = list(part.tensor.shape), str(part.tensor.dtype).removeprefix("torch.")
        entry = written.tensors.setdefault(name, {"shape": list(part.shape), "dtype": dtype, "pieces": []})
        entry["pieces"].append({"file": path.name, "key": key, "offsets": list(part.offsets), "shape": shape})
    digest = write_safetensors(path, described, contents)
    written.files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}


def checksum(index: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an index."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    content = json.dumps({**index, "checksum": checksum(index)})  # indented, Python would write it, ten times as slowly
    write_atomically(folder / "index.json", content.encode())
    flush(folder)
