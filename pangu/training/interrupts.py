"""Ctrl-C: the first one saves and stops the run, the second one ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Self

from pangu.common.exit_status import INTERRUPTED
from pangu.topology.launch import is_first_process

SAME_SECONDS = 0.3
"""Time within which interrupts count as one: a terminal and a launcher may both pass it on."""
GRACE_SECONDS = 15.0
"""Time to end by KeyboardInterrupt where there is no step to save, before the process is killed: data preparation waits
for its workers and removes partial files."""
ENDED = "\ninterrupted; start the same command again to continue from the newest checkpoint"


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End this process at Ctrl-C without an exception: torch aborts with a core dump if one is raised in its import."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler and current_thread() is main_thread()
    if is_default:
        signal.signal(signal.SIGINT, _end_now)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_now(*_: object) -> None:
    if is_first_process():
        with suppress(OSError):
            os.write(2, f"{ENDED}\n".encode())  # a handler may interrupt Python's own print
    os._exit(INTERRUPTED)


class Interrupts:
    """Thread that ends this process after Ctrl-C, wherever the main thread is.

    Python runs signal handlers between two operations of the main thread, which may be in a collective for minutes, and
    aborts with a core dump if it ends while another thread is in the store. This thread reads the signals as they
    arrive and ends the process without Python's cleanup: at the second Ctrl-C, or `GRACE_SECONDS` after the first one
    where it raises KeyboardInterrupt instead of asking the training loop to stop (`process.StopSignals`). Use it as a
    context manager. It does nothing where Ctrl-C is ignored, as in a shell's background.
    """

    def __init__(self, speaks: bool) -> None:
        """Prepare the thread; `speaks`: True in the process that prints for all."""
        self._speaks = speaks
        self._ended = Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = -1
        self._is_active = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and current_thread() is main_thread()

    def __enter__(self) -> Self:
        """Start the thread."""
        if self._is_active:
            self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            Thread(target=self._watch, name="interrupts", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._ended.set()
        if self._is_active:
            signal.set_wakeup_fd(self._previous)
        else:
            self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        with self._reader:
            self._wait(None)
            saves = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if saves:
                self._say("\nCtrl-C: the run saves and stops after this step; press Ctrl-C again to stop it at once")
            first_s = time.monotonic()
            self._wait(None if saves else GRACE_SECONDS)
            while time.monotonic() - first_s < SAME_SECONDS and not self._ended.is_set():
                self._wait(None if saves else GRACE_SECONDS)
            if not self._ended.is_set():
                self._say(ENDED)
                os._exit(INTERRUPTED)

    def _wait(self, limit_s: float | None) -> None:
        self._reader.settimeout(limit_s)
        with suppress(TimeoutError):
            while (number := self._reader.recv(1)) and number[0] != signal.SIGINT:
                pass

    def _say(self, text: str) -> None:
        if self._speaks and not self._ended.is_set():
            print(text, file=sys.stderr, flush=True)
