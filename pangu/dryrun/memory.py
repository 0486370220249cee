"""What a device's memory holds at its fullest: each storage from its allocation to its end, by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "logits")
"""Weights that the model computes with; sums of gradients; main parameters and moments; what forward leaves to
backward, and what is there while it computes; weights that are whole between unshard and reshard; buffers of
collectives; logits and their gradient."""
OWNED = frozenset({"parameters", "gradients", "optimizer", "gathered"})
"""Kinds that belong to flat parameters, whatever modules compute."""
_GRAIN = 512
"""Bytes; allocators of devices round up to multiples of it."""


@dataclass
class LiveStorage:
    """Live memory of a device."""

    size: int
    kind: str
    micro: int | None
    reference: weakref.ref[torch.UntypedStorage]


class Memory:
    """Live storages of one device, and the peak."""

    def __init__(self, freed: Callable[[int], None] = lambda key: None) -> None:
        """`freed` is told the key of each storage that ends."""
        self._live: dict[int, LiveStorage] = {}
        self._freed = freed
        self.bytes: Counter[str] = Counter()
        """Kind -> what is live now."""
        self.peak_bytes: dict[str, int] = {}
        """The same at the peak."""
        self.peak = 0
        self.peak_place = ""
        """Who made the allocation that led to it."""
        self.total = 0
        """Live bytes of all kinds."""
        self.high = 0
        """Most of them since somebody set this."""
        self.log: list[Any] | None = None
        """Every change, as a pair of storage and bytes, if somebody wants them; others may add entries."""

    def __contains__(self, key: int) -> bool:
        return key in self._live

    def add(self, storage: torch.UntypedStorage, kind: str, place: str, micro: int | None = None) -> None:
        """A storage that has not been seen before, allocated for a micro-batch or for none."""
        key = storage._cdata

        def end(_: object) -> None:
            self._grow(self._live[key], -self._live[key].size, "")
            del self._live[key]
            self._freed(key)

        self._live[key] = LiveStorage(0, kind, micro, weakref.ref(storage, end))
        self.resize(storage, place)

    def resize(self, storage: torch.UntypedStorage, place: str) -> None:
        """A storage that has been seen may have another length now."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            size = -(-storage.nbytes() // _GRAIN) * _GRAIN
            change, entry.size = size - entry.size, size
            self._grow(entry, change, place)

    def label(self, tensor: torch.Tensor, kind: str, unless: Container[str] = ()) -> None:
        """Say whose a storage is, unless it is of one of some kinds; one on another device is nobody's."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.kind not in unless:
            self.bytes[entry.kind] -= entry.size
            self.bytes[kind] += entry.size
            entry.kind = kind

    def of_micro_batch(self, micro: int) -> Counter[str]:
        """Kind -> bytes that live of what was allocated for a micro-batch."""
        total: Counter[str] = Counter()
        for entry in self._live.values():
            total[entry.kind] += entry.size * (entry.micro == micro)
        return total

    def restart(self) -> None:
        """Forget the peak; what is live now is the beginning of another one."""
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
