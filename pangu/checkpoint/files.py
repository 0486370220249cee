"""Checkpoints in logical space: safetensors files and a JSON index with checksums, committed by one atomic rename.

    checkpoints/step-00000100/
        index.json            facts of the run, and for every tensor its global shape, format and pieces
        tensors-00000.safetensors, ...

A tensor is called `KIND/NAME`: KIND is `weight` (the fp32 master) or a name of the optimizer's state, NAME the global
name of the logical tensor. Nothing in a checkpoint depends on the layout that wrote it, and loading one runs no code
from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from pangu.config.errors import UserError

FORMAT = "pangu-checkpoint"
VERSION = 1
FILE_BYTES = 2**30
"""Tensors are gathered into files of about this size, which bounds the host memory that a save takes."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies below the folder of all checkpoints."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first. Half-written ones carry another name and are not among them."""
    return sorted(path for path in folder.glob("step-????????") if (path / "index.json").is_file())


def save(path: Path, tensors: Iterable[tuple[str, Tensor]], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint beside its final place, flush it to disk, and rename it.

    Args:
        path: final folder; one that is there already is replaced.
        tensors: (`KIND/NAME`, global tensor) pairs.
        facts: JSON-able facts of the run, stored as they are.

    Raises:
        UserError: if the disk refuses; nothing of the attempt is left and older checkpoints stay as they are.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        index: dict[str, Any] = {"format": FORMAT, "version": VERSION, **facts, "tensors": {}, "files": {}}
        batch: dict[str, Any] = {}
        size = 0
        for name, tensor in tensors:
            batch[name] = tensor.detach().cpu().contiguous().numpy()
            size += batch[name].nbytes
            if size >= FILE_BYTES:
                _write_tensors(partial, batch, index)
                batch, size = {}, 0
        if batch:
            _write_tensors(partial, batch, index)
        _write_bytes(partial / "index.json", json.dumps(index, indent=1).encode())
        _flush(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{path}: the checkpoint could not be written ({error}); older checkpoints are untouched. Free space or "
            "mend the folder's permissions, then start the same command again: it continues from the newest one"
        ) from error


def prune(folder: Path, keep: int) -> None:
    """Delete the oldest checkpoints until `keep` are left; 0 keeps all."""
    for path in list_checkpoints(folder)[: -keep or None] if keep else []:
        # renamed first: a deletion that is cut short must not leave a damaged checkpoint behind
        doomed = path.with_name(f".{path.name}.old")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def read_index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint.

    Raises:
        UserError: if the folder holds no checkpoint that this version can read.
    """
    try:
        index = json.loads((path / "index.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no checkpoint here (index.json is missing)") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'index.json'}: cannot be read ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path / 'index.json'}: this is not the index of a checkpoint of pangu")
    if index["version"] != VERSION:
        raise UserError(f"{path}: format version {index['version']}; this version of pangu reads {VERSION}")
    return index


def load(path: Path, index: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    """Verify the files of a checkpoint and copy the tensors that are asked for.

    Args:
        path: the checkpoint.
        index: from `read_index`.
        wanted: `KIND/NAME` -> tensor of the global shape that receives it.

    Raises:
        UserError: naming every tensor that is missing or has another shape, or the first damaged file.
    """
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in index["tensors"]]
    for name, tensor in wanted.items():
        entry = index["tensors"].get(name)
        if entry and entry["shape"] != list(tensor.shape):
            problems.append(f"{name}: {entry['shape']} in the checkpoint, {list(tensor.shape)} in the model")
    if problems:
        raise UserError(f"{path}: does not fit this model:\n" + "\n".join(f"  {line}" for line in problems))
    by_file: dict[str, list[str]] = {}
    for name in wanted:
        by_file.setdefault(index["tensors"][name]["file"], []).append(name)
    for file, names in by_file.items():
        _verify(path / file, index["files"][file])
        with safe_open(path / file, framework="pt") as opened, torch.no_grad():
            for name in names:
                wanted[name].copy_(opened.get_tensor(name))


def _write_tensors(folder: Path, batch: dict[str, Any], index: dict[str, Any]) -> None:
    file = folder / f"tensors-{len(index['files']):05d}.safetensors"
    save_file(batch, file)
    _flush(file)
    index["files"][file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    for name, array in batch.items():
        index["tensors"][name] = {"shape": list(array.shape), "dtype": str(array.dtype), "file": file.name}


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _flush(path)


def _flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        intact = size == expected["bytes"] and _digest(path) == expected["sha256"]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not intact:
        raise UserError(
            f"{path}: damaged: {size} bytes with another checksum than the {expected['bytes']} that were written; "
            "delete this checkpoint and start again to continue from the one before it"
        )
