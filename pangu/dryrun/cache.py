"""Cache of dry-run results in the user's cache folder, keyed by program version and inputs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pangu.common.files import write_atomically


def cache_folder() -> Path:
    """Return the cache folder of this machine's measurements, a temporary one if the user's is not writable."""
    temporary = Path(tempfile.gettempdir()) / f"pangu-{os.getuid()}"
    try:
        home = Path.home()
    except RuntimeError:  # a container may run under a user id without a home folder
        home = temporary
    for folder in (Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "pangu", temporary):
        if is_usable(folder):
            return folder
    return temporary


def is_usable(folder: Path) -> bool:
    """Return whether a folder is the user's own, and writable, but not by everybody; create it if it does not exist."""
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.stat()
        return os.access(folder, os.W_OK) and status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH
    return False


def identify(inputs: Any) -> str:
    """Return a name for a measurement of this program version: a hash of all its inputs."""
    digest = _program().copy()
    digest.update(json.dumps(inputs, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def read_cached(file: Path) -> Any:
    """Return the result in a file, or None if it is missing or damaged, or if someone else may have written it."""
    with suppress(OSError):
        data = file.read_bytes()
        digest, content = data[:32], data[32:]
        if digest == hashlib.sha256(content).digest() and is_usable(file.parent):
            return pickle.loads(content)
    return None


def write_cached(file: Path, found: Any) -> None:
    """Write a result, if the file is writable."""
    with suppress(OSError):
        content = pickle.dumps(found)
        write_atomically(file, hashlib.sha256(content).digest() + content, sync=False)


@cache
def _program() -> Any:
    files = sorted(Path(__file__).resolve().parents[1].glob("**/*.[pc]*"))
    content = b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".cpp"))
    return hashlib.sha256(version("torch").encode() + content)
