"""Activation offload: what the layers save for backward waits in host memory (Rhu et al. 2016, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, UntypedStorage

Saved = Tensor | Callable[[], Tensor]
"""What stands for a saved tensor: itself, or a function that brings it back."""
SMALLEST = 4096
"""Bytes from which on memory is moved. A copy of less takes as long to start and frees next to nothing."""


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that `device` can copy to and from while it computes; a flat tensor, not filled."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


def address(tensor: Tensor) -> int:
    """Of the memory that a tensor is a view of: the same for all its views, on the meta device too."""
    return tensor.untyped_storage()._cdata


class Offload:
    """Moves the tensors that the layers of one pass save to the host and back, a layer ahead of their backward.

    Copies run beside the computation, on a stream of their own. The memory of a layer is given back when the next layer
    has been computed, which is the time that its copies have; the last layer, whose backward comes first, keeps its
    own. On a CPU the host is the device: the same copies are made, in order.
    """

    def __init__(self, device: torch.device, resident: Collection[int]) -> None:
        """
        Args:
            device: where the layers compute.
            resident: addresses of memory that stays there anyway, that of the parameters.
        """
        self._resident = resident
        self._lane = CopyStream(device)
        self._layer = _Layer(self._lane, None)

    def pack(self, tensor: Tensor) -> Saved:
        """Begin to copy the memory that `tensor` is a view of; the views that a layer saves share one copy."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or storage._cdata in self._resident:
            return tensor
        layer, moved = self._layer, self._layer.move(storage, tensor._version)
        dtype, place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

        def restored() -> Tensor:
            memory = layer.restored(moved)
            return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), *place)

        return restored

    def end_layer(self) -> None:
        """The forward pass of a layer is over; what is saved from here on is the next one's."""
        self._layer.copied = self._lane.mark()
        if self._layer.before is not None:
            self._layer.before.leave()
        self._layer = _Layer(self._lane, self._layer)


class CopyStream:
    """The stream of copies to and from the host; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    def after_computation(self) -> AbstractContextManager[object]:
        """What is done inside is queued here, behind all that has been queued to be computed so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.accelerator.current_stream())
        return self.stream

    def mark(self) -> torch.Event | None:
        """For `wait`: all copies so far."""
        return None if self.stream is None else self.stream.record_event()

    @staticmethod
    def wait(mark: torch.Event | None) -> None:
        """What is computed from now on waits for these copies; the host does not."""
        if mark is not None:
            torch.accelerator.current_stream().wait_event(mark)


class _Moved:
    """Some memory of the device as bytes, and its copy in (pinned) host memory."""

    def __init__(self, here: Tensor) -> None:
        self.here: Tensor | None = here
        self.host = host_memory(here.numel(), here.dtype, here.device)
        self.host.copy_(here, non_blocking=True)


class _Layer:
    """What one layer has moved."""

    def __init__(self, lane: CopyStream, before: _Layer | None) -> None:
        self.before = before
        self.copied: torch.Event | None = None
        self._returned: torch.Event | None = None
        self._lane = lane
        self._moved: dict[tuple[int, int], _Moved] = {}

    def move(self, storage: UntypedStorage, version: int) -> _Moved:
        # nothing is given back before the layer ends, so an address means the same memory as long as it is asked for
        key = storage._cdata, version
        if key not in self._moved:
            here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            with self._lane.after_computation():
                self._moved[key] = _Moved(here)
        return self._moved[key]

    def leave(self) -> None:
        """Give the device's memory back, as soon as the copies are made."""
        self._lane.wait(self.copied)
        for moved in self._moved.values():
            moved.here = None

    def restored(self, moved: _Moved) -> Tensor:
        """Memory of this layer, on the device again; begins to bring back that of the layer before."""
        self._bring_back()
        if self.before is not None:
            self.before._bring_back()
            self.before = None
        self._lane.wait(self._returned)
        assert moved.here is not None
        return moved.here

    def _bring_back(self) -> None:
        away = [moved for moved in self._moved.values() if moved.here is None]
        self._moved.clear()  # from here on, what autograd forgets is gone
        if not away:
            return
        for moved in away:
            moved.here = torch.empty(moved.host.shape, dtype=moved.host.dtype, device=self._lane.device)
        with self._lane.after_computation():
            for moved in away:
                assert moved.here is not None
                moved.here.copy_(moved.host, non_blocking=True)
        self._returned = self._lane.mark()
