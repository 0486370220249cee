"""How every command ends."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable

from pangu.config.errors import FIRST_SPEAKS_SECONDS, LocalError, UserError, printable

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of any command that SIGINT ends."""
_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR)
"""Errors of a path that cannot even be asked about, which a user gave. All others of the system are faults of ours."""


def exit_status(action: Callable[[], object], says: str, first: bool = True) -> int:
    """Run a command's action: 0 if it succeeds, 2 with one message on standard error, after `says`, for what the user
    can mend. `first`: this is the first process of the command, which prints what is wrong for all."""
    try:
        action()
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and (error.filename is None or error.errno not in _OF_A_PATH):
            raise
        if not first and not isinstance(error, LocalError):
            # most errors are everybody's; the launcher ends this process before the pause is over
            time.sleep(FIRST_SPEAKS_SECONDS)
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"{says}: {printable(text)}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
