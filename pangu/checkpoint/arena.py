"""Memory of the host that holds what is being saved, filled beside the computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from pangu.checkpoint.files import Slice
from pangu.topology.copy_stream import CopyStream, Moment, host_memory

CHUNK_BYTES = 2**30
"""torch gives pinned memory in powers of two."""
_ALIGNMENT = 64


def _format(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 where the run is. Frozen weights and moments may be bf16: a checkpoint does not depend on how they
    are kept."""
    return torch.promote_types(tensor.dtype, torch.float32)


def as_saved(slices: Iterable[tuple[str, Slice]]) -> Iterator[tuple[str, Slice]]:
    """In the format of checkpoints."""
    return ((name, replace(part, tensor=part.tensor.to(_format(part.tensor)))) for name, part in slices)


class _CopiesMade(Moment):
    """When the device has made its copies, and a thread those of the host, which training does not wait for either."""

    def __init__(self, device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`pairs`: of the host's tensors, copy and original."""
        super().__init__(device)
        thread = ThreadPoolExecutor(1, "copies for a checkpoint")
        self._copied = thread.submit(_copy, pairs)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        self._copied.result()
        super().wait()

    def precede(self) -> None:
        """The host waits for its own copies: it is who changes what is offloaded."""
        self._copied.exception()  # it is the save's
        super().precede()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for copied, tensor in pairs:
        copied.copy_(tensor)


class Arena:
    """Room for one save at a time, which the next one uses again: pinning pages takes longer than copying into them."""

    def __init__(self, device: torch.device, slices: Iterable[tuple[str, Slice]]) -> None:
        """`device`: that what is saved lies on. A CPU takes memory at every save; others now, for all `slices` that a
        save may have: the first save is waited for like any other."""
        self._device, self._keeps = device, device.type != "cpu"
        self._stream = CopyStream(device)
        self._chunks: list[Tensor] = []
        """Bytes, pinned."""
        if self._keeps:
            self.rooms(slices)

    def rooms(self, slices: Iterable[tuple[str, Slice]]) -> list[tuple[str, Slice]]:
        """The same slices with uninitialized memory for tensors; those that begin alike have the same memory again, if
        it is kept."""
        slices = list(slices)
        if not self._keeps:
            rooms = (torch.empty_like(part.tensor, dtype=_format(part.tensor)) for _, part in slices)
            return [(name, replace(part, tensor=room)) for (name, part), room in zip(slices, rooms, strict=True)]
        sizes = [part.tensor.numel() * _format(part.tensor).itemsize for _, part in slices]
        places = self._places([size + -size % _ALIGNMENT for size in sizes])
        return [
            (name, replace(part, tensor=room[:size].view(_format(part.tensor)).view(part.tensor.shape)))
            for (name, part), size, room in zip(slices, sizes, places, strict=True)
        ]

    def copy(self, slices: Iterable[tuple[str, Slice]]) -> tuple[Iterator[tuple[str, Slice]], Moment]:
        """Begin to copy. Returns the copies, the first of which waits for all, and the moment from which the originals
        may change: whatever changes them lets it precede."""
        slices = list(slices)
        copies = self.rooms(slices)
        pairs = [(copied.tensor, part.tensor) for (_, copied), (_, part) in zip(copies, slices, strict=True)]
        with self._stream.after_computation():
            for copied, tensor in pairs:
                if tensor.device.type == self._device.type:
                    copied.copy_(tensor.to(copied.dtype), non_blocking=True)
            # what is offloaded lies on the host
            moment = _CopiesMade(self._device, [pair for pair in pairs if pair[1].device.type != self._device.type])

        def arrived() -> Iterator[tuple[str, Slice]]:
            moment.wait()
            yield from copies

        return arrived(), moment

    def _places(self, sizes: list[int]) -> Iterator[Tensor]:
        """The rest of a chunk, for each size: the next one begins where it ends, or in the next chunk."""
        left, number, rest = sum(sizes), -1, torch.empty(0, dtype=torch.uint8)
        for size in sizes:
            if size > len(rest) or number < 0:
                number += 1
                if number == len(self._chunks):
                    numel = max(size, min(CHUNK_BYTES, left))
                    self._chunks.append(host_memory(numel, torch.uint8, self._device))
                rest = self._chunks[number]
            yield rest
            rest, left = rest[size:], left - size
