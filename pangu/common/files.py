"""Safe reading and atomic writing of files in folders that others may write to or read.

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
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pangu.common.errors import UserError, reading

MOST_VALUES = 100_000
"""Largest number of values that references (anchors) in a YAML file may expand to."""
DEPTH = 100
"""Largest nesting depth of a file. Settings nest fewer than ten levels; Python's own limit depends on the call
stack."""
_OPEN_FILES = Path("/proc/self/fd")
"""Open files of this process, where the system shows them."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, with the reason, if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested more than {DEPTH} levels deep") from error
    level = [value]
    for _ in range(DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} levels deep")


def refuse_expanding(values: Any) -> None:
    """Raise ValueError if YAML references are cyclic or expand to too many values: a kilobyte may name a billion."""
    left, count = [values], 0
    while left and count <= MOST_VALUES:
        value, count = left.pop(), count + 1
        left += _children(value)
    if left:
        raise ValueError(f"its references expand to more than {MOST_VALUES:,} values")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json(path: Path, *, shared: bool = False) -> Any:
    """Return the value in a JSON file; a `shared` folder must hold a regular one. Raises UserError if it is invalid."""
    with reading(path):
        if shared:
            with open_regular(path, "rb") as file:
                content = file.read()
        else:
            if path.exists() and not path.is_file():  # a named pipe would wait for ever, a device never end
                raise UserError(f"{path}: is not a regular file")
            content = path.read_bytes()
    with reading(path, ValueError, rule="is not JSON in UTF-8"):
        return parse_json(content.decode("utf-8-sig"))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if the file holds anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object")
    return value


def open_regular(path: Path, mode: str, **options: Any) -> Any:
    """Open a file as `open` does, but raise UserError if it is a symbolic link or no regular file."""
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
        raise UserError(f"{path}: is not a regular file")
    return handle


def _refused(path: Path) -> str:
    return f"{path}: is a symbolic link, which is not followed inside a run folder; replace it with its target"


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise a UserError that names all symbolic links among `paths`."""
    if lines := [_refused(path) for path in paths if path.is_symlink()]:
        raise UserError("\n".join(lines))


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk, whichever process wrote it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class NewFile:
    """File that gets its name only when it is complete. All methods raise OSError.

    Where the file system has unnamed files (Linux; not over NFS), nothing is left of an abandoned one, even if the
    process is killed. Elsewhere it has a temporary name, which is left then.
    """

    def __init__(self, path: Path) -> None:
        """Open the file in the folder of `path`, unnamed where the file system allows it."""
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        unnamed = _open_unnamed(path.parent)
        self._named = unnamed is None
        if unnamed is None:
            self._temporary.unlink(missing_ok=True)
        # x: a link that somebody plants there is not followed
        self.file: BinaryIO = self._temporary.open("xb") if unnamed is None else unnamed

    def finish(self, sync: bool = True) -> None:
        """Write all buffered data under the temporary name, and to disk unless `sync` is false."""
        self.file.flush()
        if sync:
            os.fsync(self.file.fileno())
        if not self._named:
            self._temporary.unlink(missing_ok=True)  # of a process that was killed here and had the same number
            _give_name(self.file, self._temporary)
            self._named = True
        self.file.close()

    def publish(self) -> None:
        """Give a finished file its final name, replacing any file that has it."""
        self._temporary.replace(self._path)

    def close(self) -> None:
        """Delete a file that is not published; a published file stays."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.file.close()
        if self._named:
            self._temporary.unlink(missing_ok=True)


def _open_unnamed(folder: Path) -> BinaryIO | None:
    """Return an unnamed file in the folder, or None if the file system has none."""
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except OSError:  # what is wrong with the folder itself is reported when a named file is opened
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
    """Yield a temporary path that is renamed to `path` once the block ends and all is on disk; deleted on error."""
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
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file, flush it to disk (unless `sync` is false) and only then name it: it is complete or absent."""
    with closing(NewFile(path)) as new:
        new.file.write(content)
        new.finish(sync)
        new.publish()
