"""Asynchronous messages between pipeline stages, with one process group per channel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pangu.collectives.agreement import in_thread
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup


def wait_arguments(group: dist.ProcessGroup) -> tuple[timedelta, ...]:
    """Return the arguments of `Work.wait` for a message; by default, gloo waits as long as for a connection."""
    # a timeout would make NCCL block the host
    is_gloo = dist.get_backend(group) == "gloo"
    return (group._get_backend(torch.device("cpu")).options._timeout,) if is_gloo else ()


@dataclass(frozen=True)
class Transfer:
    """Messages in flight; their tensors must stay alive and unchanged until the transfer is done."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work | Future[bool], ...]
    """Handles. gloo completes a send only for a caller that waits: a thread waits, and sets a future."""
    wait_arguments: tuple[timedelta, ...] = ()
    """Arguments of `Work.wait` for each message."""

    @property
    def is_done(self) -> bool:
        """True if all messages are complete."""
        return all(work.done() if isinstance(work, Future) else work.is_completed() for work in self.works)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the tensors and return them; raise `RuntimeError` if the peer is gone or does not answer in time."""
        for work in self.works:
            if isinstance(work, Future):
                work.result()
            else:
                work.wait(*self.wait_arguments)
        return self.tensors


def _rounds(channels: Sequence[tuple[str, int, int]]) -> list[dict[int, tuple[str, int, int]]]:
    """Split channels into rounds with at most one channel per stage, each a map of stage -> channel."""
    # four stages, one kind of message:    0-1 2-3    1-2
    rounds: list[dict[int, tuple[str, int, int]]] = []
    for channel in channels:
        free = next((stages for stages in rounds if stages.keys().isdisjoint(channel[1:])), None)
        if free is None:
            rounds.append(free := {})
        free |= dict.fromkeys(channel[1:], channel)
    return rounds


def exchange_bytes(
    sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], group: AxisGroup
) -> None:
    """Send tensors to places in a group, and receive others, all at the same time, each pair's in the same order."""
    works = [dist.irecv(tensor, group=group.process_group, group_src=place) for tensor, place in received]
    works += [dist.isend(tensor, group=group.process_group, group_dst=place) for tensor, place in sent]
    for work in filter(None, works):
        work.wait(*wait_arguments(group.process_group))


class Channels:
    """Message channels between the stages of this rank's pipeline.

    A channel is one kind of message from one stage to another. Each has a process group of these two, hence on GPUs a
    communicator and a stream: messages of one channel arrive in order and never wait for another channel's. In a larger
    group NCCL creates such a communicator per pair at the first send; other backends send all on one stream.
    """

    def __init__(self, mesh: Mesh, channels: Sequence[tuple[str, int, int]]) -> None:
        """Create all `channels` (message kind, source stage, target stage), given in the same order on every stage."""
        self._stage, self._device = mesh.at.pipeline, mesh.device
        ranks = mesh.layout.peers(mesh.rank, "pipeline")
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._arguments: tuple[timedelta, ...] = ()
        # a group's name counts the groups of its process: every stage creates one per round, if need be of itself alone
        for stages in _rounds(channels):
            channel = stages.get(self._stage)
            members = [mesh.rank] if channel is None else sorted(ranks[stage] for stage in channel[1:])
            group = mesh.new_group(members, "messages")
            if channel is not None:
                self._groups[channel], self._arguments = group, wait_arguments(group)
        # NCCL connects a pair at its first message, which both sides then wait for: do that now, in an order that all
        # stages share
        for kind, source, target in channels:
            if self._stage == source:
                self.send(kind, [torch.zeros(1, device=self._device)], target).wait()
            if self._stage == target:
                self.receive(kind, [(1,)], torch.float32, source).wait()

    def send(self, kind: str, tensors: Sequence[Tensor], peer: int) -> Transfer:
        """Start to send tensors to the stage `peer`."""
        group, place = self._groups[kind, self._stage, peer], int(peer > self._stage)
        dense = tuple(tensor.contiguous() for tensor in tensors)
        works = [work for tensor in dense if (work := dist.isend(tensor, group=group, group_dst=place)) is not None]
        if dist.get_backend(group) == "gloo":
            return Transfer(dense, tuple(in_thread("send", partial(work.wait, *self._arguments)) for work in works))
        return Transfer(dense, tuple(works))

    def receive(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, peer: int) -> Transfer:
        """Start to receive tensors of these shapes from the stage `peer`."""
        group, place = self._groups[kind, peer, self._stage], int(peer > self._stage)
        empty = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape in shapes)
        works = [work for tensor in empty if (work := dist.irecv(tensor, group=group, group_src=place)) is not None]
        return Transfer(empty, tuple(works), self._arguments)
