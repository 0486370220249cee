"""Prepared corpus of the standard library, which `prepare.stdlib` makes: its files, and whether they are complete."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError
from pangu.common.files import open_regular, read_json
from pangu.data.indexed import bin_path, idx_path

_FORMAT = 1  # version of the recipe; raise it when the files that `prepare.stdlib` writes change


class StdlibPaths:
    """Paths in a prepared folder: SentencePiece model, prefixes of the indexed documents, manifest (written last)."""

    def __init__(self, folder: Path) -> None:
        """Set the paths; no file needs to exist."""
        self.folder = folder
        self.tokenizer, self.manifest = folder / "tokenizer.model", folder / "manifest.json"
        self.train, self.validation = folder / "train", folder / "validation"


def is_prepared(paths: StdlibPaths, vocab: int, validation_fraction: float) -> bool:
    """Return whether the folder's manifest matches the arguments and the file sizes."""
    # the Python version is recorded but not compared: a run resumed under another version keeps its data
    try:
        manifest = read_json(paths.manifest, shared=True)
        sizes = {name: record["bytes"] for name, record in manifest["files"].items()}
        return (
            manifest["recipe"] == stdlib_recipe(vocab, validation_fraction)
            and sizes.keys() == _names(paths)
            and all((paths.folder / name).stat().st_size == size for name, size in sizes.items())
        )
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return False


def find_damage(paths: StdlibPaths, *names: str) -> list[str]:
    """Return the named files (default: all) whose checksums differ from the manifest; all if it is unreadable."""
    chosen = names or sorted(_names(paths))
    try:
        written = read_json(paths.manifest, shared=True)["files"]
        return [name for name in chosen if file_record(paths.folder / name) != written[name]]
    except (UserError, OSError, KeyError, TypeError):
        return list(chosen)


def stdlib_recipe(vocab: int, validation_fraction: float) -> dict[str, Any]:
    """Return the settings that determine the files, as the manifest has them."""
    return {"format": _FORMAT, "vocab": vocab, "validation_fraction": validation_fraction}


def file_record(path: Path) -> dict[str, int | str]:
    """Return the size and the checksum of a file, as the manifest has them."""
    with open_regular(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _names(paths: StdlibPaths) -> set[str]:
    prefixes = (paths.train, paths.validation)
    return {paths.tokenizer.name, *(f(prefix).name for prefix in prefixes for f in (bin_path, idx_path))}
