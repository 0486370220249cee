"""Standard output and standard error that survive a reader that has left, a full disk or a closed descriptor."""

from __future__ import annotations

import io
import logging
import os
import select
import sys

log = logging.getLogger("pangu")


class _Descriptor(io.FileIO):
    """File descriptor that discards all output after its first failure and remembers the failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.failure: OSError | None = None
        self.is_needed = True

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            while self.failure is None:
                written = super().write(data)  # type: ignore[arg-type]
                if written is not None:
                    return written
                select.select([], [self], [])  # another process has made a shared pipe non-blocking
        except OSError as failure:
            self.failure = failure
            if not self.is_needed:
                log.warning("standard output was closed (%s); the run continues without it", failure.strerror)
        return size


def guard_console() -> None:
    """Let this process survive the loss of its standard output and standard error; escape unprintable characters."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next file that is opened would get what is meant for the console
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        raw = _raw(stream)
        if raw is None or raw.fileno() != number or isinstance(raw, _Descriptor):
            continue  # something else has taken its place, or it is guarded already
        stream.flush()
        guarded = io.TextIOWrapper(
            io.BufferedWriter(_Descriptor(number)),
            stream.encoding,
            "backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, guarded)


def outlive_console() -> None:
    """Turn the loss of standard output into a warning: this process no longer exists for its output."""
    raw = _raw(sys.stdout)
    if isinstance(raw, _Descriptor):
        raw.is_needed = False


def output_failure() -> OSError | None:
    """Return the error that kept standard output from being written; None if there was none or output is not needed."""
    if sys.stdout is not None:
        sys.stdout.flush()
    raw = _raw(sys.stdout)
    return raw.failure if isinstance(raw, _Descriptor) and raw.is_needed else None


def _raw(stream: object) -> io.FileIO | None:
    """Return the descriptor below a text stream, if there is one; an unbuffered Python has no buffer in between."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, io.FileIO) else None
