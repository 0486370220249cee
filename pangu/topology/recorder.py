"""Recorder through which a rank reports the phases and collectives of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from pangu.topology.recording import Tape


@dataclass
class Recorder:
    """Sink for spans and collectives of a rank; a no-op unless a tape is running."""

    tape: Tape | None = None
    watches: bool = False
    """True to watch all asynchronous collectives, even without a tape: they may be waited for in a later step."""

    def span(self, what: Any) -> AbstractContextManager[object]:
        """Return a context that records its block as a span."""
        return nullcontext() if self.tape is None else self.tape.span(what)

    def meeting(self, axis: str) -> AbstractContextManager[object]:
        """Return a context that records its block as one blocking collective of an axis."""
        return nullcontext() if self.tape is None else self.tape.meeting(axis)

    def watched(self, axis: str, work: dist.Work, read: Tensor) -> dist.Work | Watched:
        """Return the handle of a collective that just started and reads `read`, wrapped if its wait is to be timed."""
        if not self.watches:
            return work
        if self.tape is not None:
            return self.tape.begun(self, axis, work, read)
        return Watched(self, axis, work.wait, None, None, None)


class Watched(NamedTuple):
    """Asynchronous collective whose wait is recorded as a span."""

    recorder: Recorder
    axis: str
    waits: Callable[[], object]
    tape: Tape | None
    """Tape that recorded the start."""
    number: int | None
    read: Tensor | None
    """Tensor that NCCL reads; the reference keeps its memory from being reused while another stream waits."""

    def wait(self) -> object:
        """Wait for the collective, recorded as a span if a tape runs on the compute stream."""
        tape = self.recorder.tape
        if tape is None or tape.is_elsewhere:
            return self.waits()
        with tape.span(self.axis, self.number if tape is self.tape else None):
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
