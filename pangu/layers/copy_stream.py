"""Copies between a device and its host that run beside the computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that `device` can copy to and from while it computes; a flat tensor, not filled."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


class CopyStream:
    """The stream of copies to and from the host; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def after_computation(self) -> AbstractContextManager[object]:
        """What is done inside is queued here, behind all that has been queued to be computed so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream())
        return self._stream

    def record(self) -> torch.Event | None:
        """For `wait`: all copies so far."""
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(event: torch.Event | None) -> None:
        """What is computed from now on waits for these copies; the host does not."""
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)
