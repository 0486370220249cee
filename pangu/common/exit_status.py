"""Exit statuses of all commands, and the error message that goes with each."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pangu.common.commands import as_typed, print_error
from pangu.common.console import guard_console, output_failure
from pangu.common.errors import FIRST_SPEAKS_SECONDS, DeviceError, LocalError, LostError, UserError, printable, writing

USER_ERROR = 2
"""Exit status after one message, for errors that the user can fix."""
DEVICE_ERROR = 3
"""Exit status when a device computes wrongly: the same command should run without the host that the message names."""
RETRYABLE = 128 + signal.SIGTERM
"""Exit status when other processes are gone, so that the same command may succeed: that of SIGTERM, which schedulers
restart."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, that of any command ended by SIGINT."""
READER_GONE = 128 + signal.SIGPIPE
"""Exit status when the reader of standard output has left, that of any command ended by SIGPIPE."""
_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR)
"""Errors of a user's path that cannot even be looked up. All other system errors are faults of the program."""


def exit_status(action: Callable[[], object], is_first: Callable[[], bool] = lambda: True) -> int:
    """Run a command's action and return its exit status.

    Args:
        action: The command's work; it may end with SystemExit.
        is_first: Returns whether this is the first process, which reports shared errors; asked late: ranks may change.

    Returns:
        0 on success, or one of the statuses above; the first three come with one message on standard error.
    """
    guard_console()
    try:
        return _status_of(action, is_first) or _status_of(_require_output, is_first)
    except KeyboardInterrupt:
        return INTERRUPTED


def _status_of(action: Callable[[], object], is_first: Callable[[], bool]) -> int:
    try:
        action()
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and (error.filename is None or error.errno not in _OF_A_PATH):
            raise
        if not is_first() and not isinstance(error, LocalError):
            # most errors are everybody's; the launcher ends this process before the pause is over
            time.sleep(FIRST_SPEAKS_SECONDS)
        text = printable(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else as_typed(str(error)))
        print_error(text)
        tell_launcher(text)
        if isinstance(error, DeviceError):
            return DEVICE_ERROR
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


def tell_launcher(text: str) -> None:
    """Write a message where torchrun looks for the cause of a failure; its final report on the screen ends with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the message has been printed
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
