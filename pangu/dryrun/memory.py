"""Live memory of a device with its peak, and the races for its buffers.

Each stream counts its operations and knows how far it has seen the others (vector clocks, Mattern 1989; torch's CUDA
sanitizer orders its streams alike). An event carries the clock of its stream at the time of recording. A collective
runs on a stream of its group, as in NCCL: after the earlier work of the calling stream, before the work after the wait.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pangu.dryrun.device import FakeDevice, StreamEntry
from pangu.schedule.buffers import allocated

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "logits")
"""Kinds of memory: compute weights; gradient sums; main parameters and moments; activations, both saved and temporary;
gathered weights between unshard and reshard; buffers of collectives; logits and their gradient."""
OWNED = frozenset({"parameters", "gradients", "optimizer", "gathered"})
"""Kinds that belong to flat parameters, whichever module is computed."""
Stream = int | str
HOST: Stream = "the host"
Clock = dict[Stream, int]


class Access(NamedTuple):
    """Time and place of a stream's last read or write of a buffer."""

    stream: Stream
    tick: int
    place: str


@dataclass(eq=False)
class LiveStorage:
    """Storage that is allocated on the device."""

    kind: str
    micro: int | None
    """Micro-batch that it was allocated for."""
    stream: int
    """Stream it was allocated on, which may reuse the memory once it is freed."""
    size: int = 0
    written: Access | None = None
    read: dict[Stream, Access] = field(default_factory=dict)
    reference: weakref.ref[torch.UntypedStorage] | None = None


class Memory:
    """Live storages of one device, and their peak."""

    def __init__(self, freed: Callable[[LiveStorage], None] | None = None) -> None:
        """Create an empty record; `freed` is called with each storage that is released."""
        self.live: dict[int, LiveStorage] = {}
        """Live storages by address (`_cdata`)."""
        self._freed = freed
        self.bytes: Counter[str] = Counter()
        """Live bytes by kind."""
        self.peak_bytes: dict[str, int] = {}
        """Bytes by kind at the peak."""
        self.peak = 0
        self.peak_place = ""
        """Location of the allocation that led to the peak."""
        self.total = 0
        """Live bytes of all kinds."""
        self.log: list[Any] | None = None
        """List of all changes as (storage, bytes) if a caller sets one; callers may add entries of their own."""

    def add(
        self, storage: torch.UntypedStorage, kind: str, place: str = "", micro: int | None = None, stream: int = 0
    ) -> None:
        """Add a new storage, allocated for a micro-batch or for none."""
        key, entry = storage._cdata, LiveStorage(kind, micro, stream)

        def end(_: object) -> None:
            del self.live[key]
            self._grow(entry, -entry.size, "")
            if self._freed is not None:
                self._freed(entry)

        entry.reference = weakref.ref(storage, end)
        self.live[key] = entry
        self.resize(storage, place)

    def resize(self, storage: torch.UntypedStorage, place: str) -> None:
        """Update the size of a known storage."""
        if (entry := self.live.get(storage._cdata)) is not None:
            size = allocated(storage.nbytes())
            change, entry.size = size - entry.size, size
            self._grow(entry, change, place)

    def label(self, tensor: torch.Tensor, kind: str, unless: Container[str] = ()) -> None:
        """Set the kind of a storage, unless its kind is in `unless`; ignore storages of other devices."""
        entry = self.live.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.kind not in unless:
            self.bytes[entry.kind] -= entry.size
            self.bytes[kind] += entry.size
            entry.kind = kind

    def restart(self) -> None:
        """Reset the peak to the memory that is live now."""
        self.peak = 0
        self._note_peak("the beginning")

    def _grow(self, entry: LiveStorage, change: int, place: str) -> None:
        if self.log is not None:
            self.log.append((entry, change))
        self.bytes[entry.kind] += change
        self.total += change
        if self.total > self.peak:
            self._note_peak(place)

    def _note_peak(self, place: str) -> None:
        self.peak, self.peak_place = self.total, place
        self.peak_bytes = {name: self.bytes[name] for name in KINDS}


class RaceDetector:
    """Detector of pairs of accesses to a buffer that no synchronization orders."""

    def __init__(self, fake: FakeDevice | None, note_wait: Callable[[str], None] = lambda what: None) -> None:
        """Start with no accesses, on a device that tells streams apart; None: there is one stream.

        `note_wait` is called when the host has waited for a stream, an event or the device.
        """
        self.races: Counter[str] = Counter()
        """Number of occurrences of each race, by its description."""
        self._fake, self._note_wait = fake, note_wait
        self._clocks: dict[Stream, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}

    @property
    def current(self) -> int:
        """Current stream of the calling thread."""
        return 0 if self._fake is None else self._fake.current_stream()

    def close(self) -> None:
        """Leave the device's log to the next detector, also when buffers of this one are garbage-collected later."""
        self._fake = None

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
                self._note_wait({2: "a stream", 3: "the device", 4: "an event"}[kind])
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
