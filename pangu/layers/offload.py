"""Activation offload: tensors saved for the backward pass wait in host memory (Rhu et al. 2016, section 3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pangu.layers.recompute import Saved
from pangu.topology.copy_stream import CopyStream, host_memory

SMALLEST = 4096
"""Minimum bytes to move: a smaller copy takes as long to start and frees next to nothing."""


@dataclass
class _Block:
    device: Tensor | None
    host: Tensor


@dataclass
class _Layer:
    before: _Layer | None
    last: bool
    """True if the forward pass ends with this layer, whose saved tensors stay."""
    copied: torch.Event | None = None
    returned: torch.Event | None = None
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)
    """Blocks by address and version; nothing is freed while the layer runs, so an address is unique."""


class Offload:
    """Offload of the tensors that the layers of one forward pass save, on a side stream."""

    # Tensors return one layer ahead of their backward pass. A layer's memory is freed when the next layer has been
    # computed, which is the time for its copies; the last layer, whose backward pass comes first, stays. On a CPU the
    # same copies are made, in order.
    #
    # compute   forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1
    # copy                | 1 out     | 2 out     | 2 back     | 1 back     |
    # freed                           | 1         | 2          |

    def __init__(self, device: torch.device, resident: Collection[int]) -> None:
        """Start offloading; `resident`: addresses of memory that stays on the device anyway, or that layers share."""
        self._resident = resident
        self._stream = CopyStream(device)
        self._layer: _Layer | None = None

    def begin_layer(self, last: bool) -> None:
        """Start a layer; `last`: the forward pass ends with it."""
        self._layer = _Layer(self._layer, last)

    def pack(self, tensor: Tensor) -> Saved:
        """Start to copy the storage of `tensor`; the views that a layer saves share one copy."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST or storage._cdata in self._resident:
            return tensor
        layer, key = self._layer, (storage._cdata, tensor._version)
        assert layer is not None
        if layer.last:
            resident = tensor.detach()

            def unpack_resident() -> Tensor:
                self._bring_back(layer.before)
                return resident

            return unpack_resident
        if key not in layer.blocks:
            memory = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            with self._stream.after_computation():
                host = host_memory(memory.numel(), memory.dtype, memory.device).copy_(memory, non_blocking=True)
            layer.blocks[key] = _Block(memory, host)
        block, dtype = layer.blocks[key], tensor.dtype
        view = tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack() -> Tensor:
            self._bring_back(layer)
            self._bring_back(layer.before)
            self._stream.wait(layer.returned)
            assert block.device is not None
            return block.device.view(dtype).as_strided(*view)

        return unpack

    def end_layer(self) -> None:
        """Free what the previous layer saved."""
        assert self._layer is not None
        self._layer.copied = self._stream.record()
        if (before := self._layer.before) is not None:
            self._stream.wait(before.copied)
            for block in before.blocks.values():
                block.device = None

    def _bring_back(self, layer: _Layer | None) -> None:
        if layer is None or not layer.blocks:
            return
        absent = list(layer.blocks.values())
        layer.blocks.clear()  # from here on, autograd holds the only references
        for block in absent:
            block.device = torch.empty(block.host.shape, dtype=block.host.dtype, device=self._stream.device)
        with self._stream.after_computation():
            for block in absent:
                assert block.device is not None
                block.device.copy_(block.host, non_blocking=True)
        layer.returned = self._stream.record()
