"""Messages between the stages of a pipeline: sent and received without waiting, one process group for each lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.topology.mesh import Mesh


@dataclass(frozen=True)
class Message:
    """Tensors on their way. They must stay alive, and must not be changed, until the message is done."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    @property
    def is_done(self) -> bool:
        """True if waiting would not take time."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, sent or received. Raises RuntimeError if the other side is gone or does not answer in time."""
        for work in self.works:
            work.wait()
        return self.tensors


class Channels:
    """Lanes between the stages of this rank's pipeline.

    A lane is one kind of message in one direction (to a later or to an earlier stage). Each has a process group, hence
    on GPUs a communicator and a stream for each pair of stages: messages of one pair and lane arrive in the order in
    which they were sent, and never wait for messages of another lane, as they would where NCCL puts both directions of
    a pair on one stream.
    """

    def __init__(self, mesh: Mesh, lanes: Sequence[tuple[str, int, int]]) -> None:
        """
        Args:
            mesh: whose pipeline axis is used.
            lanes: (kind of message, from stage, to stage) of all that will be sent, in the same order on every stage.
        """
        self._stage = mesh.at.pipeline
        self._device = mesh.device
        ranks = mesh.layout.peers(mesh.rank, "pipeline")
        directions = dict.fromkeys((kind, target > source) for kind, source, target in lanes)
        self._groups = {direction: mesh.new_group(ranks) for direction in directions}
        # NCCL makes a pair's communicator at its first message, which both sides then wait for: once now, in an order
        # that all stages agree on
        for kind, source, target in lanes:
            if self._stage == source:
                self.send(kind, [torch.zeros(1, device=self._device)], target).wait()
            if self._stage == target:
                self.receive(kind, [(1,)], torch.float32, source).wait()

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int) -> Message:
        """Begin to send tensors to stage `peer`."""
        group = self._groups[kind, peer > self._stage]
        kept = tuple(tensor.contiguous() for tensor in tensors)
        return _message(kept, [dist.isend(tensor, group=group, group_dst=peer) for tensor in kept])

    def receive(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, peer: int) -> Message:
        """Begin to receive tensors of the given shapes from stage `peer`."""
        group = self._groups[kind, peer < self._stage]
        kept = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        return _message(kept, [dist.irecv(tensor, group=group, group_src=peer) for tensor in kept])


def _message(tensors: tuple[Tensor, ...], works: Sequence[dist.Work | None]) -> Message:
    return Message(tensors, tuple(work for work in works if work is not None))
