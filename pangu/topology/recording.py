"""What a rank does in a step, and when: noted where it is done, and read when the step is over.

Times are those of the stream that computes (on a CPU, the host's), so that nothing has to be waited for: a span lasts
as long as it keeps that stream from other work. Spans are nested; each moment belongs to the innermost one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.topology.copy_stream import Moment
from pangu.topology.recorder import Recorder


class Span(NamedTuple):
    """Times in seconds since the recording began."""

    what: Any
    """A word, the axis of a collective that is waited for, or a pipeline's action."""
    parent: int | None
    """Place in the list of the span that this one lies in."""
    message: int | None
    """Place among the collectives of its axis of the one that is waited for."""
    start: float
    stop: float


class Recording(NamedTuple):
    spans: list[Span]
    """In the order of their starts; the first one is the whole."""
    messages: dict[str, list[tuple[float, float]]]
    """Axis -> when this rank came to each collective, and when that was over; infinity: unknown."""


@dataclass
class _Open:
    what: Any
    parent: int | None
    message: int | None
    start: Moment
    stop: Moment | None = None


class Tape:
    """A recording under way."""

    def __init__(self, what: Any, device: torch.device) -> None:
        """`what` the time is for that no span claims."""
        self._device = device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._spans: list[_Open] = []
        self._stack: list[int] = []
        self._messages: dict[str, list[tuple[Moment, list[Moment]]]] = {}
        self._streams: dict[str, torch.Stream] = {}
        self._begin(what, None)

    def read(self) -> Recording:
        """End, and read all times: the one time that the host waits for the device."""
        end, zero = self._now(), self._spans[0].start
        ended = {axis: [one[0] if one else None for _, one in messages] for axis, messages in self._messages.items()}
        for moment in (moment for moments in ended.values() for moment in moments if moment is not None):
            moment.precede()
        self._now().wait()
        return Recording(
            [
                Span(
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
    def is_elsewhere(self) -> bool:
        """Whether the caller gives work to another stream than the one that computes, which waits for nothing then."""
        return self._stream is not None and self._stream != torch.accelerator.current_stream()

    def meeting(self, axis: str) -> AbstractContextManager[None]:
        """Within the block, a collective of this axis is begun and waited for."""
        return self.span(axis, self._come(axis)[0])

    def begun(self, recorder: Recorder, axis: str, work: dist.Work, read: Tensor) -> Watched:
        """Note that a collective begins, and when it will be over."""
        number, ended = self._come(axis)
        if self._device.type != "cpu":
            # a stream that waits for the collective tells when it is over; those of an axis end in their order
            with self._streams.setdefault(axis, torch.Stream(self._device)):
                work.wait()
                ended.append(self._now())
            return Watched(recorder, axis, ended[0].precede, self, number, read)
        if isinstance(work, dist.Work):  # not if the ranks are threads
            work.get_future().add_done_callback(lambda _: ended.append(self._now()))
        return Watched(recorder, axis, work.wait, self, number, None)

    def _come(self, axis: str) -> tuple[int, list[Moment]]:
        messages, ended = self._messages.setdefault(axis, []), list[Moment]()
        messages.append((self._now(), ended))
        return len(messages) - 1, ended

    def _now(self) -> Moment:
        return Moment(self._device)

    def _begin(self, what: Any, message: int | None) -> _Open:
        span = _Open(what, self._stack[-1] if self._stack else None, message, self._now())
        self._stack.append(len(self._spans))
        self._spans.append(span)
        return span

    @contextmanager
    def span(self, what: Any, message: int | None = None) -> Iterator[None]:
        """What is done within the block; `message`: waiting for this one of the collectives of the axis `what`, None if
        this tape has not seen it begin."""
        span = self._begin(what, message)
        try:
            yield
        finally:
            span.stop = self._now()
            self._stack.pop()


class Watched(NamedTuple):
    """A collective; the time that it is waited for is recorded."""

    recorder: Recorder
    axis: str
    waits: Callable[[], object]
    tape: Tape | None
    """On which it began."""
    number: int | None
    read: Tensor | None
    """What it reads, if NCCL, for which some stream has waited, does not keep that from being given to others."""

    def wait(self) -> object:
        tape = self.recorder.tape
        if tape is None or tape.is_elsewhere:
            return self.waits()
        with tape.span(self.axis, self.number if tape is self.tape else None):
            return self.waits()


def stop(recorder: Recorder) -> Recording:
    assert recorder.tape is not None
    tape, recorder.tape = recorder.tape, None
    return tape.read()
