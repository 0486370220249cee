"""Race detector for buffers of asynchronous collectives and copies: a happens-before order over streams.

Each stream counts its operations and knows how far it has seen the others (vector clocks, Mattern 1989; torch's CUDA
sanitizer orders its streams alike). An event carries the clock of its stream at the time of recording. A collective
runs on a stream of its group, as in NCCL: after the earlier work of the calling stream, before the work after the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pangu.dryrun.device import StreamEntry

Stream = int | str
HOST: Stream = "the host"
Clock = dict[Stream, int]


@dataclass(frozen=True)
class _Access:
    """Time and place of a stream's last read or write of a buffer."""

    stream: Stream
    tick: int
    place: str


@dataclass
class _Buffer:
    stream: Stream = 0
    """Stream it was allocated on, which may reuse the memory once it is freed."""
    written: _Access | None = None
    read: dict[Stream, _Access] = field(default_factory=dict)


@dataclass
class Begun:
    """Collective that has started, and may still be hidden by a matmul."""

    stream: Stream
    tick: int
    """Time of its start on its stream."""
    scope: Any
    axis: str
    kind: str
    size: int
    """Size in bytes."""


class OnItsWay(NamedTuple):
    """Collective in flight, from its start to its wait."""

    work: Any
    clock: Clock
    """Clock of its stream once it is done."""
    buffers: list[torch.UntypedStorage]
    """Buffers that NCCL keeps alive until a wait, or until the next collective if nobody can wait any more."""
    begun: Begun


class RaceDetector:
    """Detector of pairs of accesses to a buffer that no synchronization orders."""

    def __init__(self) -> None:
        """Start with no buffers and no accesses."""
        self.races: dict[str, int] = {}
        """Number of occurrences of each race, by its description."""
        self._clocks: dict[Stream, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._buffers: dict[int, _Buffer] = {}

    def access(self, stream: Stream, reads: Iterable[int], writes: Collection[int], place: Callable[[], str]) -> None:
        """Record that a stream, or the host, reads some buffers and writes others, in program order."""
        clock = self.tick(stream)
        use = _Access(stream, clock[stream], place())
        for key in reads:
            buffer = self._buffers.setdefault(key, _Buffer())
            if buffer.written is not None:
                self._check(clock, use, "reads", buffer.written, "writes")
            buffer.read[stream] = use
        for key in writes:
            buffer = self._buffers.setdefault(key, _Buffer())
            if buffer.written is not None:
                self._check(clock, use, "writes", buffer.written, "writes")
            for earlier in buffer.read.values():
                self._check(clock, use, "writes", earlier, "reads")
            buffer.written, buffer.read = use, {}

    def tick(self, stream: Stream) -> Clock:
        """Advance the clock of a stream, and return how far it has seen the others."""
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def clock(self, stream: Stream) -> Clock:
        """Return the clock of work that is enqueued on a stream now: the host knows what it has waited for."""
        clock = self._clocks.setdefault(stream, {})
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def order(self, before: Clock, after: Stream) -> None:
        """Make everything known in one clock known to a stream from now on."""
        _join(self.clock(after), before)

    def follow(self, entries: Iterable[StreamEntry]) -> None:
        """Record operations on streams and events."""
        for kind, event, stream in entries:
            if kind == 0:
                self._events[event] = dict(self.clock(stream))
            elif kind == 1:
                self.order(self._events.get(event, {}), stream)
            else:
                waited = {2: [self.clock(stream)], 4: [self._events.get(event, {})]}.get(kind)
                for clock in list(self._clocks.values()) if waited is None else waited:
                    _join(self._clocks[HOST], clock)

    def allocate(self, key: int, stream: Stream) -> None:
        """Add a buffer."""
        self._buffers[key] = _Buffer(stream)

    def free(self, key: int) -> None:
        """Free a device buffer: its stream reuses the memory, so uses on other streams must be known to be done.

        Collectives keep their own buffers alive.
        """
        buffer = self._buffers.pop(key, _Buffer())
        clock = self.clock(buffer.stream)
        for use in (buffer.written, *buffer.read.values()):
            if use is not None and isinstance(use.stream, int):
                self._check(clock, _Access(buffer.stream, 0, "its owner"), "frees", use, "uses")

    def forget(self, key: int) -> None:
        """Free a host buffer; its allocator waits for copies."""
        self._buffers.pop(key, None)

    def _check(self, clock: Clock, use: _Access, does: str, earlier: _Access, did: str) -> None:
        if earlier.stream != use.stream and clock.get(earlier.stream, 0) < earlier.tick:
            race = f"{use.place} {does} what {earlier.place} {did}, before its wait"
            self.races[race] = self.races.get(race, 0) + 1


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
