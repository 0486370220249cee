"""One run at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pangu.config.errors import UserError, writing
from pangu.config.files import open_regular

log = logging.getLogger("pangu")

MOST_BYTES = 200
"""Of what run.lock says: a name of a machine and a number."""


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Hold `run.lock` in a run folder, which says who holds it. The system lets go of it when the process ends, however
    it ends, on network file systems too, so that nobody has to delete it after a crash.

    Raises:
        UserError: if another process holds it, or the folder cannot be written.
    """
    path = output / "run.lock"
    with writing(path):
        file = open_regular(path, "a+b")
    with file:
        file.seek(0)
        last = file.read(MOST_BYTES).decode(errors="replace")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"{output}: another run works in this folder ({last}); end it or choose another train.output"
                raise UserError(message) from error
            log.warning("%s: this file system has no locks (%s): see to it that no other run uses it", path, error)
        if last:
            log.info("the last run in this folder (%s) was killed", last)
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
