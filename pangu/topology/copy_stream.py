"""Device-host copies on a side stream, and device timestamps."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized flat host tensor, pinned for `device`, so that copies overlap computation."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


class CopyStream:
    """Side stream for copies between device and host; a no-op on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream on `device`."""
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def after_computation(self) -> AbstractContextManager[object]:
        """Return a context that queues work on this stream, after all computation queued so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream())
        return self._stream

    def record(self) -> torch.Event | None:
        """Record an event after all copies queued so far, to pass to `wait`."""
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(event: torch.Event | None) -> None:
        """Let computation queued from now on wait for these copies, without blocking the host."""
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)


class DeviceEvent:
    """Event on the current stream, with the methods of torch.Event; on a CPU, the time of creation."""

    def __init__(self, device: torch.device) -> None:
        """Record a timing event on the current stream of `device`."""
        self._event: Any = None
        self._time = time.perf_counter()
        if device.type != "cpu":
            self._event = torch.accelerator.current_stream().record_event(torch.Event(device, enable_timing=True))

    def synchronize(self) -> None:
        """Block the host until the device reaches this point (a host sync)."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self) -> None:
        """Let computation queued from now on wait for this point, without blocking the host."""
        CopyStream.wait(self._event)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the seconds between two points; both must have been waited for."""
        return self._time - earlier._time if self._event is None else earlier._event.elapsed_time(self._event) / 1000
