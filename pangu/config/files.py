"""Files that others may have written or may see: read with one message for what is wrong, written whole or not at all.

A run folder, and a checkpoint in it, may be shared: whoever may write there could plant a symbolic link to a file of
yours under a name that a run is about to write. Hence no link is followed below a run folder; paths that the user
gives, the run folder itself among them, may be links.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pangu.config.errors import UserError

DEPTH = 100
"""Brackets within brackets that a file may have. Files of this field have fewer than ten; Python's own limit depends on
what else is on the stack."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, with the reason, for any text that is none."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"more than {DEPTH} brackets within brackets") from error
    level = [value]
    for _ in range(DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"more than {DEPTH} brackets within brackets")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(path: Path, *, shared: bool = False) -> Any:
    """The value in a JSON file; in a `shared` folder it must be a regular file. Raises UserError if it is none."""
    try:
        if shared:
            with open_regular(path, "rb") as file:
                content = file.read()
        else:
            content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: it is not UTF-8") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: it is not JSON ({error})") from error


def open_regular(path: Path, mode: str, **options: Any) -> Any:
    """As `open`, of a file in a folder where others may write.

    Raises:
        UserError: if it is a symbolic link or something else than a file.
        OSError: as `open`.
    """
    return open(path, mode, opener=_open_regular, **options)


def _open_regular(path: str, flags: int) -> int:
    try:
        # without O_NONBLOCK a named pipe would wait for somebody who writes
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(_refused(Path(path))) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: is no regular file")
    return handle


def _refused(path: Path) -> str:
    return f"{path}: is a symbolic link, and none is followed inside a run folder; put there what it leads to"


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise a UserError that names all symbolic links among `paths`."""
    if lines := [_refused(path) for path in paths if path.is_symlink()]:
        raise UserError("\n".join(lines))


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk, whoever has written it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file under a temporary name, flush it to disk (unless `sync` is false) and rename it, so that it is whole
    or absent. Raises OSError and then leaves nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
