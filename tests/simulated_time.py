"""Simulated time, which moves on when all threads of a test wait for it: no test depends on how fast a machine is."""

from __future__ import annotations

from threading import Condition, Event

PATIENCE_SECONDS = 300.0
"""Real seconds after which a thread that neither waits nor ends is an error."""


class SimulatedTime:
    """A stand-in for the module `time` in a program whose threads wait for events.

    Each thread waits for one event, see `event`, which it is ended by. When the test and all these threads wait, time
    moves to the moment when the first of them wants to go on.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._now_s = 0.0
        self._running = 1
        """Threads that do not wait: at first the one of the test."""
        self._waiting: dict[object, float] = {}
        """When those that wait want to go on."""

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, object())

    def event(self) -> _SimulatedEvent:
        """Return the event that ends a thread, which counts as running from now on."""
        with self._changed:
            self._running += 1
        return _SimulatedEvent(self)

    def wait(self, seconds: float, waiter: object) -> None:
        with self._changed:
            self._waiting[waiter] = self._now_s + seconds
            self._running -= 1
            self._move_on()
            woken = self._changed.wait_for(lambda: waiter not in self._waiting, PATIENCE_SECONDS)
            assert woken, "some thread neither waits nor ends"

    def end(self, waiter: object) -> None:
        """Count the thread of an event, which may wait or run, no longer."""
        with self._changed:
            if self._waiting.pop(waiter, None) is None:
                self._running -= 1
                self._move_on()
            self._changed.notify_all()

    def _move_on(self) -> None:
        if self._running == 0 and self._waiting:
            self._now_s = min(self._waiting.values())
            due = [waiter for waiter, until_s in self._waiting.items() if until_s <= self._now_s]
            for waiter in due:
                del self._waiting[waiter]
            self._running += len(due)
            self._changed.notify_all()


class _SimulatedEvent(Event):
    """The event that ends a thread; waiting for it takes simulated time."""

    def __init__(self, time: SimulatedTime) -> None:
        super().__init__()
        self._time = time

    def set(self) -> None:
        if not self.is_set():
            super().set()
            self._time.end(self)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if not self.is_set():
            self._time.wait(timeout, self)
        return self.is_set()
