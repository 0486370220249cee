"""Race detector for buffers of asynchronous collectives and copies: a happens-before order over streams.

Each stream counts its operations and knows how far it has seen the others (vector clocks, Mattern 1989; torch's CUDA
sanitizer orders its streams alike). An event carries the clock of its stream at the time of recording. A collective
runs on a stream of its group, as in NCCL: after the earlier work of the calling stream, before the work after the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pangu.dryrun.device import StreamEntry

Stream = int | str
HOST: Stream = "the host"
Clock = dict[Stream, int]


class _Access(NamedTuple):
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


@dataclass(eq=False)
class Started:
    """Collective that has started, and may still be hidden by a matmul."""

    stream: Stream
    tick: int
    """Time of its start on its stream."""
    counts: Counter[tuple[Any, ...]]
    """Counter of the action that started it."""
    name: tuple[str, str]
    """Axis and kind."""
    nbytes: int

    def hide(self) -> None:
        """Count the collective as hidden."""
        self.counts["hidden_calls", *self.name] += 1
        self.counts["hidden_bytes", *self.name] += self.nbytes


class RaceDetector:
    """Detector of pairs of accesses to a buffer that no synchronization orders."""

    def __init__(self) -> None:
        """Start with no buffers and no accesses."""
        self.races: Counter[str] = Counter()
        """Number of occurrences of each race, by its description."""
        self._clocks: dict[Stream, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._buffers: dict[int, _Buffer] = {}

    def access(self, stream: Stream, reads: set[int], writes: set[int], place: Callable[[], str]) -> None:
        """Record that a stream, or the host, reads some buffers and writes others, in program order."""
        clock = self.tick(stream)
        use = _Access(stream, clock[stream], place())
        for key in reads | writes:
            buffer, does = self._buffers.setdefault(key, _Buffer()), "writes" if key in writes else "reads"
            self._check(clock, use, does, buffer.written, "writes")
            if key in writes:
                for earlier in buffer.read.values():
                    self._check(clock, use, does, earlier, "reads")
                buffer.written, buffer.read = use, {}
            else:
                buffer.read[stream] = use

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
                waited = {2: [self.clock(stream)], 4: [self._events.get(event, {})]}.get(kind, [*self._clocks.values()])
                for clock in waited:
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

    def _check(self, clock: Clock, use: _Access, does: str, earlier: _Access | None, did: str) -> None:
        if earlier is not None and earlier.stream != use.stream and clock.get(earlier.stream, 0) < earlier.tick:
            self.races[f"{use.place} {does} what {earlier.place} {did}, before its wait"] += 1


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
