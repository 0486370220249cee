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

from pangu.config.console import guard_console, output_failure
from pangu.config.errors import FIRST_SPEAKS_SECONDS, LocalError, LostError, UserError, printable, writing

USER_ERROR = 2
"""Exit status after one message for what the user can mend."""
RETRYABLE = 128 + signal.SIGTERM
"""Exit status where the same command may succeed: other processes are gone. As of what SIGTERM ends, which schedulers
start anew."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of any command that SIGINT ends."""
READER_GONE = 128 + signal.SIGPIPE
"""Exit status where nobody reads standard output any more, as of any command that SIGPIPE ends."""
_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR)
"""Errors of a path that cannot even be asked about, which a user gave. All others of the system are faults of ours."""


def exit_status(action: Callable[[], object], says: str, first: bool = True) -> int:
    """Run a command's action and return its exit status.

    Args:
        action: what the command does; it may end with SystemExit.
        says: what the one message of an error begins with.
        first: whether this is the first process of the command, which prints what is wrong for all.

    Returns:
        0 if it succeeds; 2, with one message on standard error, for what the user can mend; RETRYABLE, with one too, if
        other processes are gone; INTERRUPTED after Ctrl-C; READER_GONE, without a word, if nobody reads its output.
    """
    guard_console()
    try:
        status = _status_of(action, says, first)
        return status or _status_of(_require_output, says, first)
    except KeyboardInterrupt:
        return INTERRUPTED


def _status_of(action: Callable[[], object], says: str, first: bool) -> int:
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
    except SystemExit as end:  # of argparse, which has said why
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _require_output() -> None:
    """Raise UserError if standard output could not be written, SystemExit if only its reader has left."""
    failure = output_failure()
    if failure is not None and failure.errno == errno.EPIPE:
        raise SystemExit(READER_GONE)
    if failure is not None:
        with writing(Path("standard output")):
            raise failure


def tell_launcher(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Leave a message where torchrun looks for the cause of a failure: its report, the last that stands on the screen,
    ends with it."""
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the message has been printed
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
