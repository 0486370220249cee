"""When a device has done its work, and copies between it and its host that run beside that."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized flat tensor on the host that `device` can copy to and from while it computes."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


class CopyStream:
    """The stream of copies to and from the host; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def after_computation(self) -> AbstractContextManager[object]:
        """Within the block, work is queued on this stream, after all computation queued so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream())
        return self._stream

    def record(self) -> torch.Event | None:
        """An event after all copies so far, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(event: torch.Event | None) -> None:
        """Computation queued from now on waits for these copies; the host does not."""
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)


class Moment:
    """When a device has done all that it was given so far; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = time.perf_counter()
        if device.type != "cpu":
            self._event = torch.accelerator.current_stream().record_event(torch.Event(device, enable_timing=True))

    def wait(self) -> None:
        """Let the host wait for it."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self) -> None:
        """Computation queued from now on waits for it; the host does not."""
        CopyStream.wait(self._event)

    def seconds_since(self, earlier: Moment) -> float:
        """Both must have been waited for."""
        return self._time - earlier._time if self._event is None else earlier._event.elapsed_time(self._event) / 1000
