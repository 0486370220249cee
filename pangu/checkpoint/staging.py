"""Host memory for the state being saved, filled while training continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pangu.checkpoint.files import Slice
from pangu.collectives.agreement import in_thread
from pangu.topology.copy_stream import CopyStream, DeviceEvent, host_memory

CHUNK_BYTES = 2**30
"""Size of a chunk of pinned memory, a power of two, as torch allocates pinned memory in powers of two."""
_ALIGNMENT = 64


def _format(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor in checkpoints: fp32 or fp64, whatever the dtype of moments and frozen weights."""
    return torch.promote_types(tensor.dtype, torch.float32)


def as_saved(slices: Iterable[tuple[str, Slice]]) -> Iterator[tuple[str, Slice]]:
    """Return the slices converted to the dtypes of checkpoints."""
    return ((name, replace(part, tensor=part.tensor.to(_format(part.tensor)))) for name, part in slices)


class _HostCopies(DeviceEvent):
    """Event after the device-to-host copies and the host's own copies, which a thread makes."""

    def __init__(self, device: torch.device, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start copying `pairs` of host tensors (copy, original), not in a daemon thread: an exit would abort."""
        super().__init__(device)
        self._copied = in_thread("copies", lambda: [copied.copy_(tensor) for copied, tensor in pairs], daemon=False)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._copied.result()
        super().synchronize()

    def wait(self) -> None:
        """Delay the next update until the copies are complete; host threads, too, change offloaded state."""
        self._copied.exception()  # it is the save's
        super().wait()


class StagingMemory:
    """Reusable host memory for one save at a time: pinning pages takes longer than copying into them."""

    def __init__(self, device: torch.device, slices: Iterable[tuple[str, Slice]], keeps: bool = False) -> None:
        """Allocate memory for all `slices` that a save may have; a CPU allocates it at every save unless `keeps`."""
        self._device, self._keeps = device, keeps or device.type != "cpu"
        self._stream = CopyStream(device)
        self._chunks: list[Tensor] = []
        """Chunks of pinned memory, uint8."""
        if self._keeps:
            self.allocate(slices)

    def allocate(self, slices: Iterable[tuple[str, Slice]]) -> list[tuple[str, Slice]]:
        """Return the slices with uninitialized host tensors; with kept memory, every call returns the same memory."""
        slices = list(slices)
        if not self._keeps:
            buffers = (torch.empty_like(part.tensor, dtype=_format(part.tensor)) for _, part in slices)
            return [(name, replace(part, tensor=buffer)) for (name, part), buffer in zip(slices, buffers, strict=True)]
        sizes = [part.tensor.numel() * _format(part.tensor).itemsize for _, part in slices]
        places = self._places([size + -size % _ALIGNMENT for size in sizes])
        return [
            (name, replace(part, tensor=buffer[:size].view(_format(part.tensor)).view(part.tensor.shape)))
            for (name, part), size, buffer in zip(slices, sizes, places, strict=True)
        ]

    def copy(self, slices: Iterable[tuple[str, Slice]]) -> tuple[Iterator[tuple[str, Slice]], DeviceEvent]:
        """Start to copy; return the copies, the first of which waits for all, and the event updates must wait for."""
        slices = list(slices)
        copies = self.allocate(slices)
        pairs = [(copied.tensor, part.tensor) for (_, copied), (_, part) in zip(copies, slices, strict=True)]
        with self._stream.after_computation():
            for copied, tensor in pairs:
                if tensor.device.type == self._device.type:
                    copied.copy_(tensor.to(copied.dtype), non_blocking=True)
            # what is offloaded lies on the host
            event = _HostCopies(self._device, [pair for pair in pairs if pair[1].device.type != self._device.type])

        def arrived() -> Iterator[tuple[str, Slice]]:
            event.synchronize()
            yield from copies

        return arrived(), event

    def _places(self, sizes: list[int]) -> Iterator[Tensor]:
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
