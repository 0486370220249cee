"""Messages between pipeline stages: asynchronous, one process group for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.agreement import complete
from pangu.topology.mesh import Mesh


class _WatchedSend:
    """A gloo send. gloo reports none as completed before somebody waits for it, so a thread does."""

    def __init__(self, work: dist.Work) -> None:
        self._result: Future[bool] = Future()
        Thread(target=complete, args=(self._result, work.wait), daemon=True).start()

    def is_completed(self) -> bool:
        return self._result.done()

    def wait(self) -> None:
        self._result.result()


@dataclass(frozen=True)
class Transfer:
    """Tensors being sent or received. They must stay alive and unchanged until it is done."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work | _WatchedSend, ...]

    @property
    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors. Raises RuntimeError if the other side is gone or does not answer in time."""
        for work in self.works:
            work.wait()
        return self.tensors


class Channels:
    """Channels between the stages of this rank's pipeline.

    A channel is one kind of message in one direction (to a later or to an earlier stage). Each has a process group,
    hence on GPUs a communicator and a stream for each pair of stages: messages of one pair and channel arrive in order
    and never wait for another channel's, as they would where NCCL puts both directions of a pair on one stream.
    """

    def __init__(self, mesh: Mesh, channels: Sequence[tuple[str, int, int]]) -> None:
        """`channels`: (kind of message, from stage, to stage) of all messages, in the same order on every stage."""
        self._stage, self._device = mesh.at.pipeline, mesh.device
        ranks = mesh.layout.peers(mesh.rank, "pipeline")
        directions = dict.fromkeys((kind, target > source) for kind, source, target in channels)
        self._groups = {direction: mesh.new_group(ranks, "messages") for direction in directions}
        # NCCL makes a pair's communicator at its first message, which both sides then wait for: once now, in an order
        # that all stages agree on
        for kind, source, target in channels:
            if self._stage == source:
                self.send(kind, [torch.zeros(1, device=self._device)], target).wait()
            if self._stage == target:
                self.receive(kind, [(1,)], torch.float32, source).wait()

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int) -> Transfer:
        group = self._groups[kind, peer > self._stage]
        dense = tuple(tensor.contiguous() for tensor in tensors)
        works = [work for tensor in dense if (work := dist.isend(tensor, group=group, group_dst=peer)) is not None]
        return Transfer(dense, tuple(map(_WatchedSend, works) if dist.get_backend(group) == "gloo" else works))

    def receive(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, peer: int) -> Transfer:
        group = self._groups[kind, peer < self._stage]
        empty = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        works = [work for tensor in empty if (work := dist.irecv(tensor, group=group, group_src=peer)) is not None]
        return Transfer(empty, tuple(works))
