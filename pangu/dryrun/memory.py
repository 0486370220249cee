"""Live memory of a device and its peak: each storage by kind, from allocation to release."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "logits")
"""Kinds of memory: compute weights; gradient sums; main parameters and moments; activations, both saved and temporary;
gathered weights between unshard and reshard; buffers of collectives; logits and their gradient."""
OWNED = frozenset({"parameters", "gradients", "optimizer", "gathered"})
"""Kinds that belong to flat parameters, whichever module is computed."""
_GRAIN = 512
"""Allocation granularity in bytes: device allocators round up to multiples of it."""
Stream = int | str


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

    def __init__(self, freed: Callable[[LiveStorage], None] = lambda entry: None) -> None:
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
        self.high = 0
        """Most live bytes since this was last set."""
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
            self._freed(entry)

        entry.reference = weakref.ref(storage, end)
        self.live[key] = entry
        self.resize(storage, place)

    def resize(self, storage: torch.UntypedStorage, place: str) -> None:
        """Update the size of a known storage."""
        if (entry := self.live.get(storage._cdata)) is not None:
            size = -(-storage.nbytes() // _GRAIN) * _GRAIN
            change, entry.size = size - entry.size, size
            self._grow(entry, change, place)

    def label(self, tensor: torch.Tensor, kind: str, unless: Container[str] = ()) -> None:
        """Set the kind of a storage, unless its kind is in `unless`; ignore storages of other devices."""
        entry = self.live.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.kind not in unless:
            self.bytes[entry.kind] -= entry.size
            self.bytes[kind] += entry.size
            entry.kind = kind

    def of_micro_batch(self, micro: int) -> Counter[str]:
        """Return the live bytes by kind that were allocated for a micro-batch."""
        total: Counter[str] = Counter()
        for entry in self.live.values():
            total[entry.kind] += entry.size * (entry.micro == micro)
        return total

    def restart(self) -> None:
        """Reset the peak to the memory that is live now."""
        self.peak = 0
        self._note_peak("the beginning")

    def _grow(self, entry: LiveStorage, change: int, place: str) -> None:
        if self.log is not None:
            self.log.append((entry, change))
        self.bytes[entry.kind] += change
        self.total += change
        self.high = max(self.high, self.total)
        self._note_peak(place)

    def _note_peak(self, place: str) -> None:
        if self.total > self.peak:
            self.peak, self.peak_place = self.total, place
            self.peak_bytes = {name: self.bytes[name] for name in KINDS}
