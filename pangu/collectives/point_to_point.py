"""Messages between the stages of a pipeline: sent and received without waiting, one process group for each channel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.topology.mesh import Mesh


class _Watched:
    """A gloo send. It is never known as completed before somebody waits for it: a thread of its own does."""

    def __init__(self, work: dist.Work) -> None:
        self._left: Future[None] = Future()
        Thread(target=self._watch, args=(work,), daemon=True).start()

    def _watch(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._left.set_exception(error)
        else:
            self._left.set_result(None)

    def is_completed(self) -> bool:
        return self._left.done()

    def wait(self) -> None:
        self._left.result()


@dataclass(frozen=True)
class Message:
    """Tensors on their way. They must stay alive, and must not be changed, until the message is done."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work | _Watched, ...]

    @property
    def is_done(self) -> bool:
        """True if what was sent has left, and waiting would not take time."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, sent or received. Raises RuntimeError if the other side is gone or does not answer in time."""
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
        """
        Args:
            mesh: whose pipeline axis is used.
            channels: (kind of message, from stage, to stage) of all messages, in the same order on every stage.
        """
        self._stage = mesh.at.pipeline
        self._device = mesh.device
        ranks = mesh.layout.peers(mesh.rank, "pipeline")
        directions = dict.fromkeys((kind, target > source) for kind, source, target in channels)
        self._groups = {direction: mesh.new_group(ranks) for direction in directions}
        # NCCL makes a pair's communicator at its first message, which both sides then wait for: once now, in an order
        # that all stages agree on
        for kind, source, target in channels:
            if self._stage == source:
                self.send(kind, [torch.zeros(1, device=self._device)], target).wait()
            if self._stage == target:
                self.receive(kind, [(1,)], torch.float32, source).wait()

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int) -> Message:
        """Begin to send tensors to stage `peer`."""
        group = self._groups[kind, peer > self._stage]
        kept = tuple(tensor.contiguous() for tensor in tensors)
        works = _begun(dist.isend(tensor, group=group, group_dst=peer) for tensor in kept)
        return Message(kept, tuple(map(_Watched, works)) if dist.get_backend(group) == "gloo" else works)

    def receive(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, peer: int) -> Message:
        """Begin to receive tensors of the given shapes from stage `peer`."""
        group = self._groups[kind, peer < self._stage]
        kept = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        return Message(kept, _begun(dist.irecv(tensor, group=group, group_src=peer) for tensor in kept))


def _begun(works: Iterable[dist.Work | None]) -> tuple[dist.Work, ...]:
    return tuple(work for work in works if work is not None)
