"""Who touches a buffer of an asynchronous collective or copy before its wait: a happens-before order over streams.

Each stream counts what it does and knows how far it has seen the others (vector clocks, Mattern 1989; torch's CUDA
sanitizer orders its streams alike). An event carries what its stream knew when it was recorded. A collective runs on
a stream of its group, as in NCCL: behind what the calling stream has done, before what follows the wait.
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
    """When and where a buffer was last read or written by a stream."""

    stream: Stream
    tick: int
    place: str


@dataclass
class _Buffer:
    stream: Stream = 0
    """That it was allocated on, and may be used by again once it is freed."""
    written: _Access | None = None
    read: dict[Stream, _Access] = field(default_factory=dict)


@dataclass
class Begun:
    """A collective of which it is not known yet whether a product hides it."""

    stream: Stream
    tick: int
    """When it began."""
    scope: Any
    axis: str
    kind: str
    size: int
    """Bytes."""


class OnItsWay(NamedTuple):
    """A collective from its start to its wait."""

    work: Any
    clock: Clock
    """What its stream knows once it is done."""
    buffers: list[torch.UntypedStorage]
    """NCCL keeps them until somebody waits, or until the next collective once nobody can."""
    begun: Begun


class RaceDetector:
    """Finds pairs of accesses to a buffer of which neither is known to come first."""

    def __init__(self) -> None:
        self.races: dict[str, int] = {}
        """What races with what -> how often."""
        self._clocks: dict[Stream, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._buffers: dict[int, _Buffer] = {}

    def access(self, stream: Stream, reads: Iterable[int], writes: Collection[int], place: Callable[[], str]) -> None:
        """A stream, or the host, reads some buffers and writes others, in the order in which it is told to."""
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
        """Let a stream do something, and return how far it has seen the others."""
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def clock(self, stream: Stream) -> Clock:
        """How far a stream that is given work now has seen the others: the host has seen what it waited for."""
        clock = self._clocks.setdefault(stream, {})
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def order(self, before: Clock, after: Stream) -> None:
        """What was known at some time is known to `after` from now on."""
        _join(self.clock(after), before)

    def follow(self, entries: Iterable[StreamEntry]) -> None:
        """Take note of what was done to streams and events."""
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
        """A buffer begins."""
        self._buffers[key] = _Buffer(stream)

    def free(self, key: int) -> None:
        """A buffer of the device ends: its memory goes to what its stream allocates next, so that what other streams do
        with it must be known to be over. Collectives keep theirs themselves."""
        buffer = self._buffers.pop(key, _Buffer())
        clock = self.clock(buffer.stream)
        for use in (buffer.written, *buffer.read.values()):
            if use is not None and isinstance(use.stream, int):
                self._check(clock, _Access(buffer.stream, 0, "its owner"), "frees", use, "uses")

    def forget(self, key: int) -> None:
        """A buffer of the host ends; its allocator waits for copies."""
        self._buffers.pop(key, None)

    def _check(self, clock: Clock, use: _Access, does: str, earlier: _Access, did: str) -> None:
        if earlier.stream != use.stream and clock.get(earlier.stream, 0) < earlier.tick:
            race = f"{use.place} {does} what {earlier.place} {did}, before its wait"
            self.races[race] = self.races.get(race, 0) + 1


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
