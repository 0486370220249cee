"""Where a rank tells what it does in a step, for who records it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from pangu.topology.recording import Tape, Watched


@dataclass
class Recorder:
    """Of a rank; it costs nothing while no tape runs."""

    tape: Tape | None = None
    watches: bool = False
    """Whether asynchronous collectives are watched whenever they begin: they may be waited for in a later step."""

    def span(self, what: Any) -> AbstractContextManager[object]:
        """What is done within the block."""
        return nullcontext() if self.tape is None else self.tape.span(what)

    def meeting(self, axis: str) -> AbstractContextManager[object]:
        """Within the block, a collective of this axis is begun and waited for."""
        return nullcontext() if self.tape is None else self.tape.meeting(axis)

    def watched(self, axis: str, work: dist.Work, read: Tensor) -> dist.Work | Watched:
        """A collective of this axis that was just begun, and what it reads."""
        if not self.watches:
            return work
        if self.tape is not None:
            return self.tape.begun(self, axis, work, read)
        from pangu.topology.recording import Watched

        return Watched(self, axis, work.wait, None, None, None)


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along an axis."""

    process_group: dist.ProcessGroup
    axis: str
    recorder: Recorder = field(default_factory=Recorder)

    def __deepcopy__(self, memo: Any) -> AxisGroup:
        """Return the same group: processes cannot be copied, and copies of layers communicate in it."""
        return self

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.process_group)
