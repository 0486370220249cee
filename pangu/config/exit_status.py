"""How every command ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pangu.config.errors import FIRST_SPEAKS_SECONDS, LocalError, LostError, UserError, printable

USER_ERROR = 2
"""Exit status after one message for what the user can mend."""
RETRYABLE = 128 + signal.SIGTERM
"""Exit status where the same command may succeed: other processes are gone. As of what SIGTERM ends, which schedulers
start anew."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of any command that SIGINT ends."""
_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR)
"""Errors of a path that cannot even be asked about, which a user gave. All others of the system are faults of ours."""


def exit_status(action: Callable[[], object], says: str, first: bool = True) -> int:
    """Run a command's action: 0 if it succeeds; 2, with one message on standard error after `says`, for what the user
    can mend; RETRYABLE, with one too, if other processes are gone. `first`: this is the first process of the command,
    which prints what is wrong for all."""
    try:
        action()
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and (error.filename is None or error.errno not in _OF_A_PATH):
            raise
        if not first and not isinstance(error, LocalError):
            # most errors are everybody's; the launcher ends this process before the pause is over
            time.sleep(FIRST_SPEAKS_SECONDS)
        text = printable(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        print(f"{says}: {text}", file=sys.stderr, flush=True)
        tell_launcher(text)
        return RETRYABLE if isinstance(error, LostError) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def tell_launcher(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Leave a message where torchrun looks for the cause of a failure: its report, the last that stands on the screen,
    ends with it."""
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the message has been printed
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
