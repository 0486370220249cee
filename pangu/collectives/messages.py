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
    """A tensor on its way. It must stay alive, and must not be changed, until the message is done."""

    tensor: Tensor
    work: dist.Work

    @property
    def is_done(self) -> bool:
        """True if waiting would not take time."""
        return self.work.is_completed()

    def wait(self) -> Tensor:
        """The tensor, sent or received. Raises RuntimeError if the other side is gone or does not answer in time."""
        self.work.wait()
        return self.tensor


class Channels:
    """Lanes between the stages of this rank's pipeline.

    A lane is one kind of message in one direction (to a later or to an earlier stage). Each has a process group, hence
    on GPUs a communicator and a stream for each pair of stages: messages of one pair and lane arrive in the order in
    which they were sent, and never wait for messages of another lane, as they would where NCCL puts both directions of
    a pair on one stream.
    """

    def __init__(self, mesh: Mesh, lanes: Sequence[tuple[str, bool]]) -> None:
        """
        Args:
            mesh: whose pipeline axis is used.
            lanes: (kind of message, to a later stage) of all messages that will be sent, the same on every stage.
        """
        self._stage = mesh.at.pipeline
        self._device = mesh.device
        ranks = mesh.layout.peers(mesh.rank, "pipeline")
        self._groups = {lane: mesh.new_group(ranks) for lane in sorted(set(lanes))}

    def send(self, kind: str, tensor: Tensor, peer: int) -> Message:
        """Begin to send a tensor to stage `peer`."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._groups[kind, peer > self._stage], group_dst=peer)
        assert work is not None
        return Message(tensor, work)

    def receive(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Message:
        """Begin to receive a tensor of the given shape from stage `peer`."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, group=self._groups[kind, peer < self._stage], group_src=peer)
        assert work is not None
        return Message(tensor, work)
