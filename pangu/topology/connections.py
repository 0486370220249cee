"""Connections of gloo's groups: when they are shut down, whoever waits in a collective fails, at both ends."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_noted = set[tuple[int, int]]()
"""Device and inode of the sockets of this process's groups."""


@contextmanager
def noted() -> Iterator[None]:
    """Note the connections of the groups that are created within the block."""
    before = _sockets().keys()
    yield
    _noted.update(_sockets().keys() - before)


def shut_down() -> None:
    """Shut down the connections of all groups; gloo itself closes those of a group that nothing refers to."""
    for identity, number in _sockets().items():
        if identity in _noted:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # gloo aborts the process if a socket that listens is shut down
                connection.shutdown(socket.SHUT_RDWR)
    _noted.clear()


def _sockets() -> dict[tuple[int, int], int]:
    """Return the sockets of this process, each with its number."""
    found = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the listing itself is closed by now
            status = os.fstat(int(path.name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_dev, status.st_ino] = int(path.name)
    return found
