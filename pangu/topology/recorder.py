"""Timeline of a step: spans and collectives of a rank, recorded as they happen and read when the step is over.

Times are those of the compute stream (on a CPU, of the host), so that recording never waits: a span lasts as long as it
keeps that stream from other work. Spans are nested; each moment belongs to the innermost one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.topology.copy_stream import DeviceEvent


@dataclass
class Recorder:
    """Sink for spans and collectives of a rank; a no-op unless a recording is active."""

    active: ActiveRecording | None = None
    watches: bool = False
    """True to watch all asynchronous collectives, even without a recording: they may be waited for in a later step."""

    def span(self, what: Any) -> AbstractContextManager[object]:
        """Return a context that records its block as a span."""
        return nullcontext() if self.active is None else self.active.span(what)

    def blocking(self, axis: str) -> AbstractContextManager[object]:
        """Return a context that records its block as one blocking collective of an axis."""
        return nullcontext() if self.active is None else self.active.span(axis, self.active.start_message(axis)[0])

    def watched(self, axis: str, work: dist.Work, read: Tensor) -> dist.Work | WatchedCollective:
        """Return the handle of a collective that just started and reads `read`, wrapped if its wait is to be timed."""
        if not self.watches:
            return work
        if self.active is not None:
            return self.active.start_collective(self, axis, work, read)
        return WatchedCollective(self, axis, work.wait, None, None, None)

    def stop(self) -> Recording:
        """End the recording and return its times."""
        assert self.active is not None
        active, self.active = self.active, None
        return active.read()


class WatchedCollective(NamedTuple):
    """Asynchronous collective whose wait is recorded as a span."""

    recorder: Recorder
    axis: str
    waits: Callable[[], object]
    active: ActiveRecording | None
    """Recording that holds the start."""
    number: int | None
    read: Tensor | None
    """Tensor that NCCL reads; the reference keeps its memory from being reused while another stream waits."""

    def wait(self) -> object:
        """Wait for the collective, recorded as a span if a recording is active and this is the compute stream."""
        active = self.recorder.active
        if active is None or active.is_on_side_stream:
            return self.waits()
        with active.span(self.axis, self.number if active is self.active else None):
            return self.waits()


@dataclass(frozen=True)
class AxisGroup:
    """Process group of the ranks along a mesh axis."""

    process_group: dist.ProcessGroup
    axis: str
    recorder: Recorder = field(default_factory=Recorder)
    exchanges: bool = False
    """True to all-gather and reduce-scatter by all-to-all exchanges that are summed in rank order."""
    device: torch.device | str = "cpu"
    """Device of the tensors that are sent."""

    def __deepcopy__(self, memo: Any) -> AxisGroup:
        """Return this group itself: process groups cannot be copied, and copies of layers communicate in it."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.process_group)

    @property
    def ranks(self) -> list[int]:
        """Global ranks, in order."""
        return dist.get_process_group_ranks(self.process_group)


class RecordedSpan(NamedTuple):
    """Interval of a recording, with times in seconds since its start."""

    what: Any
    """Phase name, axis of a collective that is waited for, or pipeline action."""
    parent: int | None
    """Index of the enclosing span in the list."""
    message: int | None
    """Index of the collective that is waited for, among those of its axis."""
    start: float
    stop: float


class Recording(NamedTuple):
    """Timeline of one step."""

    spans: list[RecordedSpan]
    """Spans in the order of their starts; the first one covers the recording."""
    messages: dict[str, list[tuple[float, float]]]
    """Axis -> start and end of each collective; the end is infinity if unknown."""


@dataclass
class _OpenSpan:
    what: Any
    parent: int | None
    message: int | None
    start: DeviceEvent
    stop: DeviceEvent | None = None


class ActiveRecording:
    """Recording in progress; `read` ends it."""

    def __init__(self, what: Any, device: torch.device) -> None:
        """Start the recording; time outside all other spans is attributed to `what`."""
        self._device = device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._spans: list[_OpenSpan] = []
        self._stack: list[int] = []
        self._messages: dict[str, list[tuple[DeviceEvent, list[DeviceEvent]]]] = {}
        self._streams: dict[str, torch.Stream] = {}
        self._begin(what, None)

    def read(self) -> Recording:
        """End the recording and return all times; this is its only host sync."""
        end, zero = self._now(), self._spans[0].start
        ended = {axis: [one[0] if one else None for _, one in messages] for axis, messages in self._messages.items()}
        for event in (event for events in ended.values() for event in events if event is not None):
            event.wait()
        self._now().synchronize()
        return Recording(
            [
                RecordedSpan(
                    one.what,
                    one.parent,
                    one.message,
                    one.start.seconds_since(zero),
                    (one.stop or end).seconds_since(zero),
                )
                for one in self._spans
            ],
            {
                axis: [
                    (came.seconds_since(zero), math.inf if moment is None else moment.seconds_since(zero))
                    for (came, _), moment in zip(messages, ended[axis], strict=True)
                ]
                for axis, messages in self._messages.items()
            },
        )

    @property
    def is_on_side_stream(self) -> bool:
        """True if the caller runs on another stream than the compute stream, which then waits for nothing."""
        return self._stream is not None and self._stream != torch.accelerator.current_stream()

    def start_collective(self, recorder: Recorder, axis: str, work: dist.Work, read: Tensor) -> WatchedCollective:
        """Record the start of a collective, and its end once it is known; return its handle."""
        number, ended = self.start_message(axis)
        if self._device.type != "cpu":
            # a side stream that waits for the collective timestamps its end; collectives of an axis end in order
            with self._streams.setdefault(axis, torch.Stream(self._device)):
                work.wait()
                ended.append(self._now())
            return WatchedCollective(recorder, axis, ended[0].wait, self, number, read)
        if isinstance(work, dist.Work):  # ranks simulated by threads have no futures
            work.get_future().add_done_callback(lambda _: ended.append(self._now()))
        return WatchedCollective(recorder, axis, work.wait, self, number, None)

    def start_message(self, axis: str) -> tuple[int, list[DeviceEvent]]:
        """Record that a collective of an axis starts; return its index and the list that gets its end."""
        messages, ended = self._messages.setdefault(axis, []), list[DeviceEvent]()
        messages.append((self._now(), ended))
        return len(messages) - 1, ended

    def _now(self) -> DeviceEvent:
        return DeviceEvent(self._device)

    def _begin(self, what: Any, message: int | None) -> _OpenSpan:
        span = _OpenSpan(what, self._stack[-1] if self._stack else None, message, self._now())
        self._stack.append(len(self._spans))
        self._spans.append(span)
        return span

    @contextmanager
    def span(self, what: Any, message: int | None = None) -> Iterator[None]:
        """Record the block as a span; with `message`, as the wait for that collective of the axis `what`."""
        span = self._begin(what, message)
        try:
            yield
        finally:
            span.stop = self._now()
            self._stack.pop()
