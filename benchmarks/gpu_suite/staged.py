"""A process group of device tensors whose messages pass through the host, by gloo: several ranks can share one device,
which NCCL refuses.

A collective copies to the host when it begins, and back when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"


class _Staged:
    """A gloo operation on copies, and what brings its results back."""

    def __init__(self, work: dist.Work, back: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._back, self._waited = work, back, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:  # gloo's second wait for a message would be for ever
            self._work.wait()
            self._waited = True
            with torch.no_grad():
                for device, host in self._back:
                    device.copy_(host.view_as(device))
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class StagedGroup(dist.ProcessGroup):
    """Only what the package uses of a group is there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def size(self) -> int:
        return self._size

    def _begin(
        self, begin: Callable[..., dist.Work], outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any
    ) -> _Staged:
        """`begin(outputs, inputs, *options)` on the host; a tensor that is both is given as both."""
        read = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in inputs}
        host = [read.get(id(tensor), torch.empty_like(tensor, device="cpu")).contiguous() for tensor in outputs]
        work = begin(host, list(read.values()), *options)
        return _Staged(work, list(zip((tensor.detach() for tensor in outputs), host, strict=True)))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Staged:
        return self._begin(lambda out, _: self._gloo.allreduce(out, opts), tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Staged:
        return self._begin(lambda out, _: self._gloo.broadcast(out, opts), tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Staged:
        return self._begin(lambda out, source: self._gloo.allgather([out], source), outputs[0], inputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Staged:
        def begin(out: list[Tensor], sources: list[Tensor]) -> dist.Work:
            return self._gloo.allgather([list(out[0].view(-1).chunk(self._size))], [sources[0].view(-1)])

        return self._begin(begin, [output], [source])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Staged:
        """Start an all-reduce of which each rank keeps its part."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        whole = source.detach().to("cpu", copy=True).view(-1)
        part = whole.chunk(self._size)[self.rank()]
        return _Staged(self._gloo.allreduce([whole], options), [(output.detach(), part)])

    def all_to_all_single(
        self, output: Tensor, source: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> _Staged:
        def begin(out: list[Tensor], sources: list[Tensor]) -> dist.Work:
            return self._gloo.alltoall_base(out[0], sources[0], out_sizes, in_sizes)

        return self._begin(begin, [output], [source])

    # names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Staged:
        return self._begin(lambda _, source: self._gloo.send(source, to, tag), [], tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Staged:
        return self._begin(lambda out, _: self._gloo.recv(out, source, tag), tensors, [])


def register() -> None:
    """Make the backend known to torch.distributed, in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
