"""Manifest of a pair of indexed files: their origin, their statistics, and checksums of every 64 MiB."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError
from pangu.common.files import read_json_object

FORMAT = 1
BLOCK = 64 << 20  # bytes per checksum: files of terabytes can be checked in parts, and while they are written


class Checksums:
    """BLAKE2b checksums of each 64 MiB of what is written."""

    def __init__(self, finished: list[str] | None = None) -> None:
        """Start after the blocks with the checksums `finished`."""
        self.finished = list(finished or [])  # checksums of the full blocks
        self._size = 0
        self._block = hashlib.blake2b(digest_size=16)

    def update(self, content: bytes | memoryview) -> None:
        """Add written content."""
        view = memoryview(content).cast("B")
        while len(view):
            part = view[: BLOCK - self._size]
            self._block.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size == BLOCK:
                self.finished.append(self._block.hexdigest())
                self._size, self._block = 0, hashlib.blake2b(digest_size=16)

    def all(self) -> list[str]:
        """Return the checksums of all blocks, the last one partial."""
        return [*self.finished, *([self._block.hexdigest()] if self._size else [])]


def manifest_path(prefix: str | Path) -> Path:
    """Return the manifest file of a prefix."""
    return Path(f"{prefix}.json")


def file_checksums(path: Path, start: int = 0, finished: list[str] | None = None) -> Checksums:
    """Return the checksums of a file, after `finished` full blocks up to byte `start`. Raises OSError."""
    checksums = Checksums(finished)
    with path.open("rb") as file:
        file.seek(start)
        while content := file.read(1 << 22):
            checksums.update(content)
    return checksums


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a pair of files; None if it has none. Raises UserError for a damaged one."""
    path = manifest_path(prefix)
    if not path.exists():
        return None
    manifest = read_json_object(path)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise UserError(f"{path}: is not a manifest of format {FORMAT}")
    for record in files.values():
        blocks = record.get("blake2b") if isinstance(record, dict) else None
        if not isinstance(blocks, list) or not isinstance(record.get("bytes"), int):
            raise UserError(f"{path}: lacks the checksums of a file; write the files again")
    return manifest


def find_damage(prefix: str | Path, manifest: dict[str, Any]) -> list[str]:
    """Return the problems of the files that a manifest describes, one line each. Raises OSError."""
    problems = []
    for name, record in manifest["files"].items():
        path = Path(prefix).parent / Path(name).name
        if not path.is_file():
            problems.append(f"{path}: is missing")
        elif path.stat().st_size != record["bytes"]:
            problems.append(f"{path}: has {path.stat().st_size} bytes instead of {record['bytes']}")
        else:
            checksums = file_checksums(path).all()
            wrong = [number for number, (a, b) in enumerate(zip(checksums, record["blake2b"], strict=False)) if a != b]
            if wrong or len(checksums) != len(record["blake2b"]):
                places = ", ".join(f"{number * BLOCK}" for number in wrong[:8])
                problems.append(f"{path}: damaged within {BLOCK >> 20} MiB from byte {places}")
    return problems
