"""Race detector for buffers of asynchronous collectives and copies: a happens-before order over streams.

Each stream counts its operations and knows how far it has seen the others (vector clocks, Mattern 1989; torch's CUDA
sanitizer orders its streams alike). An event carries the clock of its stream at the time of recording. A collective
runs on a stream of its group, as in NCCL: after the earlier work of the calling stream, before the work after the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pangu.dryrun.device import FakeDevice, StreamEntry
from pangu.dryrun.memory import Access, LiveStorage, Stream

HOST: Stream = "the host"
Clock = dict[Stream, int]


class RaceDetector:
    """Detector of pairs of accesses to a buffer that no synchronization orders."""

    def __init__(self, fake: FakeDevice | None) -> None:
        """Start with no accesses, on a device that tells streams apart; None: there is one stream."""
        self.races: Counter[str] = Counter()
        """Number of occurrences of each race, by its description."""
        self._fake = fake
        self._clocks: dict[Stream, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}

    @property
    def current(self) -> int:
        """Current stream of the calling thread."""
        return 0 if self._fake is None else self._fake.current_stream()

    def access(
        self, stream: Stream, reads: set[LiveStorage], writes: set[LiveStorage], place: Callable[[], str]
    ) -> None:
        """Record that a stream, or the host, reads some buffers and writes others, in program order."""
        clock = self.tick(stream)
        use = Access(stream, clock[stream], place())
        for buffer in reads | writes:
            does = "writes" if buffer in writes else "reads"
            self._check(clock, use, does, buffer.written, "writes")
            if buffer in writes:
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
        if self._fake is not None:
            self.follow(self._fake.log())
        return self._followed(stream)

    def order(self, before: Clock, after: Stream) -> None:
        """Make everything known in one clock known to a stream from now on."""
        _join(self.clock(after), before)

    def follow(self, entries: Iterable[StreamEntry]) -> None:
        """Record operations on streams and events."""
        for kind, event, stream in entries:
            if kind == 0:
                self._events[event] = dict(self._followed(stream))
            elif kind == 1:
                _join(self._followed(stream), self._events.get(event, {}))
            else:
                waited = {2: [self._followed(stream)], 4: [self._events.get(event, {})]}
                for clock in waited.get(kind, [*self._clocks.values()]):
                    _join(self._clocks[HOST], clock)

    def free(self, buffer: LiveStorage) -> None:
        """Free a device buffer: its stream reuses the memory, so uses on other streams must be known to be done.

        Collectives keep their own buffers alive.
        """
        clock = self.clock(buffer.stream)
        for use in (buffer.written, *buffer.read.values()):
            if use is not None and isinstance(use.stream, int):
                self._check(clock, Access(buffer.stream, 0, "its owner"), "frees", use, "uses")

    def _followed(self, stream: Stream) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _check(self, clock: Clock, use: Access, does: str, earlier: Access | None, did: str) -> None:
        if earlier is not None and earlier.stream != use.stream and clock.get(earlier.stream, 0) < earlier.tick:
            self.races[f"{use.place} {does} what {earlier.place} {did}, without waiting for it"] += 1


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
