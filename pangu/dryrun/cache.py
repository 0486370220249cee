"""Results of dry runs in the user's cache folder: the same program finds the same again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from pangu.config.errors import UserError
from pangu.config.files import read_json, write_atomically

log = logging.getLogger("pangu")
PATIENCE_SECONDS = 120.0
"""Longest wait for another process that measures."""


def cache_folder() -> Path:
    """Return the folder of what this machine has measured; a temporary one where the user's cannot be written."""
    temporary = Path(tempfile.gettempdir()) / f"pangu-{os.getuid()}"
    try:
        home = Path.home()
    except RuntimeError:  # as of a user who is a mere number, in a container
        home = temporary
    for folder in (Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "pangu", temporary):
        if is_usable(folder):
            return folder
    return temporary


def is_usable(folder: Path) -> bool:
    """Return whether a folder is the user's own and writable; make it if there is none."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid()
    return False


def identify(inputs: Any) -> str:
    """Return a name for what this version of the program measures, from everything that it depends on."""
    return hashlib.sha256(_program() + json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def read_cached(file: Path) -> Any:
    """Return the contents of a file; None if it is not there, or damaged."""
    with suppress(OSError, UserError):
        content = read_json(file)
        if isinstance(content, dict) and content.get("digest") == _digest(content.get("found")):
            return content["found"]
    return None


def write_cached(file: Path, found: Any) -> None:
    """Write a result, if the file can be written."""
    with suppress(OSError):
        content = json.dumps({"digest": _digest(found), "found": found})
        write_atomically(file, content.encode(), sync=False)


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Let one process at a time measure. One that takes too long is not waited for: it may be stopped."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context((folder / "modules.lock").open("w"))
            deadline = time.monotonic() + PATIENCE_SECONDS
            if not _locked(lock):
                log.warning("%-12s another process measures, which this one waits for (%s)", "measuring", lock.name)
                while not _locked(lock) and time.monotonic() < deadline:
                    time.sleep(0.1)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _program() -> bytes:
    """Return the bytes that tell this version of the program from others."""
    files = sorted(Path(__file__).resolve().parents[1].glob("**/*.[pc]*"))
    return version("torch").encode() + b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".cpp"))


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
