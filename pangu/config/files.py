"""Files that others may have written or may see: read with one message for what is wrong, written whole or not at all.

A run folder, and a checkpoint in it, may be shared: whoever may write there could plant a symbolic link to a file of
yours under a name that a run is about to write. Hence no link is followed below a run folder; paths that the user
gives, the run folder itself among them, may be links.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pangu.config.errors import UserError, reading

MOST_VALUES = 100_000
"""Values that references in a YAML file may stand for."""
DEPTH = 100
"""Brackets within brackets that a file may have. Files of this field have fewer than ten; Python's own limit depends on
what else is on the stack."""
_OPEN_FILES = Path("/proc/self/fd")
"""The open files of this process, where the system shows them."""


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


def refuse_expanding(values: Any) -> None:
    """Raise ValueError where references inside YAML stand for more values than a file of settings has, or for endlessly
    many: a file of a kilobyte may name a billion."""
    left, count = [values], 0
    while left and count <= MOST_VALUES:
        value, count = left.pop(), count + 1
        left += _children(value)
    if left:
        raise ValueError(f"its references stand for more than {MOST_VALUES:,} values")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(path: Path, *, shared: bool = False) -> Any:
    """The value in a JSON file; in a `shared` folder it must be a regular file. Raises UserError if it is none."""
    with reading(path):
        if shared:
            with open_regular(path, "rb") as file:
                content = file.read()
        else:
            if path.exists() and not path.is_file():  # a named pipe would wait for ever, a device never end
                raise UserError(f"{path}: is no regular file")
            content = path.read_bytes()
    with reading(path, ValueError, rule="cannot be read: it is not JSON in UTF-8"):
        return parse_json(content.decode("utf-8-sig"))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError if it is none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no JSON object")
    return value


def open_regular(path: Path, mode: str, **options: Any) -> Any:
    """As `open`, of a file in a folder where others may write. Raises UserError if it is a symbolic link or no regular
    file, OSError as `open`."""
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


class NewFile:
    """A file that gets its name when it is whole. All of it raises OSError.

    Where the file system has files without a name (Linux; not over NFS), nothing is left of one that is given up, even
    if the process is killed. Elsewhere it has a temporary name, which is left then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        unnamed = _open_unnamed(path.parent)
        self._named = unnamed is None
        if unnamed is None:
            self._temporary.unlink(missing_ok=True)
        # x: a link that somebody plants there is not followed
        self.file: BinaryIO = self._temporary.open("xb") if unnamed is None else unnamed

    def finish(self, sync: bool = True) -> None:
        """Have everything written so far under the temporary name, and on disk, unless `sync` is false."""
        self.file.flush()
        if sync:
            os.fsync(self.file.fileno())
        if not self._named:
            self._temporary.unlink(missing_ok=True)  # of a process that was killed here and had the same number
            _give_name(self.file, self._temporary)
            self._named = True
        self.file.close()

    def publish(self) -> None:
        """Give a finished file its name, in the place of any file that has it."""
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Leave nothing of a file that is not published; nothing happens to one that is."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.file.close()
        if self._named:
            self._temporary.unlink(missing_ok=True)


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """A file without a name, if there can be one in the folder."""
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError:  # what is wrong with the folder itself is told when a file with a name is opened
        return None


def _give_name(file: BinaryIO, path: Path) -> None:
    folder = os.open(_OPEN_FILES, os.O_RDONLY)
    try:
        # without a folder to start from, os.link takes the link in /proc itself, not the file
        os.link(str(file.fileno()), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A name beside `path` for a new file or folder, which becomes `path` when the block ends and all is on disk; after
    an error nothing of it is left. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    remove(partial)
    try:
        yield partial
        for file in (partial, *partial.rglob("*")):
            flush(file)
        partial.rename(path)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file, flush it to disk (unless `sync` is false) and only then give it its name, so that it is whole or
    absent. Raises OSError and then leaves nothing."""
    new = NewFile(path)
    try:
        new.file.write(content)
        new.finish(sync)
        new.publish()
    finally:
        new.discard()
