"""Ranks as threads of this process: what most comparisons of layouts run on.

    results = Ranks().run(4, function, *arguments)    # function(rank, world, *arguments) on 4 threads

The package has no global state, so a thread can be a rank. torch keeps its list of process groups in a variable that
can be made thread-local (`torch.testing._internal.distributed.multi_threaded_pg`). The groups are ours: torch's
threaded ones lack send and receive, and meet when a collective begins instead of when it is waited for.

What only processes can show (gloo's own sums and messages, death, signals, background saves) is tested with
`spawn.Pool`, which has the same `run`. `tests/parallel/test_threads.py` compares the two bit for bit.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from tests.spawn import WorkerError

TIMEOUT_SECONDS = 120.0
PATIENCE_SECONDS = 1.0
"""How often a rank that waits looks whether another one has failed."""
BACKEND = "threads"


@dataclass
class _World:
    """What the ranks of one job share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    meetings: dict[tuple[str, int], _Meeting] = field(default_factory=dict)
    """(group, number of the collective in it) -> the collective, until all ranks have come to it."""
    mail: dict[tuple[str, int, int], list[_Message]] = field(default_factory=lambda: defaultdict(list))
    """(group, from, to) -> messages of which only one side is there yet, in their order."""
    failed: threading.Event = field(default_factory=threading.Event)
    """A rank has failed: nobody waits any longer."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the rank that computes. torch lets go of Python's lock in every operation: ranks that took it from each
    other there took twice as long."""


@dataclass
class _Work:
    """What a rank waits for."""

    world: _World
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.done.is_set():
            return True
        self.world.turn.release()
        try:
            for _ in range(int(TIMEOUT_SECONDS / PATIENCE_SECONDS)):
                if self.done.wait(PATIENCE_SECONDS):
                    return True
                if self.world.failed.is_set():
                    break
        finally:
            self.world.turn.acquire()
        raise RuntimeError("another rank failed or did not come to a collective")

    def is_completed(self) -> bool:
        return self.done.is_set()


@dataclass
class _Meeting(_Work):
    """A collective: the last rank to come does the work for all."""

    data: dict[int, Any] = field(default_factory=dict)
    """Rank -> its tensors."""


@dataclass
class _Message(_Work):
    """A send or a receive: the last side to come copies."""

    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    sends: bool = False


def _total(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Reduced from the last rank to the first, as gloo adds a message of one or two numbers."""
    whole = tensors[-1].clone()
    for tensor in tensors[-2::-1]:
        if op == dist.ReduceOp.SUM:
            whole.add_(tensor)
        elif op == dist.ReduceOp.MAX:
            whole.copy_(torch.maximum(whole, tensor))
        else:
            assert op == dist.ReduceOp.MIN, op
            whole.copy_(torch.minimum(whole, tensor))
    return whole


class ThreadGroup(dist.ProcessGroup):
    """A process group of ranks that are threads. Only what the package uses of a group is there."""

    def __init__(self, rank: int, size: int, world: _World) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._at, self._size, self._world = rank, size, world
        self._count = 0

    @property
    def _key(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def size(self) -> int:
        return self._size

    def _meet(self, data: Any, work: Callable[[list[Any]], None]) -> _Meeting:
        key = (self._key, self._count)
        self._count += 1
        with self._world.lock:
            meeting = self._world.meetings.setdefault(key, _Meeting(self._world))
            meeting.data[self._at] = data
            if len(meeting.data) < self._size:
                return meeting
            del self._world.meetings[key]
        with torch.no_grad():
            work([meeting.data[rank] for rank in range(self._size)])
        meeting.done.set()
        return meeting

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Meeting:
        def work(data: list[Tensor]) -> None:
            whole = _total(data, opts.reduceOp)
            for tensor in data:
                tensor.copy_(whole)

        return self._meet(tensors[0].detach(), work)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Meeting:
        def work(data: list[Tensor]) -> None:
            for tensor in data:
                if tensor is not data[opts.rootRank]:
                    tensor.copy_(data[opts.rootRank])

        return self._meet(tensors[0].detach(), work)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Meeting:
        def work(data: list[tuple[list[Tensor], Tensor]]) -> None:
            for parts, _ in data:
                for part, (_, source) in zip(parts, data, strict=True):
                    part.detach().copy_(source)

        return self._meet((outputs[0], inputs[0].detach()), work)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Meeting:
        def work(data: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([part.flatten() for _, part in data])  # a part may be a view of the output
            for out, _ in data:
                out.view(-1).copy_(whole)

        return self._meet((output.detach(), source.detach()), work)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Meeting:
        def work(data: list[tuple[Tensor, Tensor]]) -> None:
            parts = _total([whole for _, whole in data], opts.reduceOp).chunk(self._size)
            for (out, _), part in zip(data, parts, strict=True):
                out.copy_(part)

        return self._meet((output.detach(), source.detach()), work)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, out_sizes: Any = None, in_sizes: Any = None, opts: Any = None
    ) -> _Meeting:
        assert output.is_contiguous(), "gloo fills memory in order, and NCCL refuses others"
        assert source.is_contiguous()

        def work(data: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            sources = [[part.clone() for part in parts] for _, parts in data]
            for at, (outs, _) in enumerate(data):
                for part, parts in zip(outs, sources, strict=True):
                    part.copy_(parts[at])

        whole = zip((output, source), (out_sizes, in_sizes), strict=True)
        outs, parts = (x.detach().split(sizes or len(x) // self._size) for x, sizes in whole)
        return self._meet((outs, parts), work)

    # names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> _Meeting:
        return self._meet(None, lambda data: None)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Message:
        return self._post(_Message(self._world, tensor=tensors[0].detach(), sends=True), (self._key, self._at, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Message:
        return self._post(_Message(self._world, tensor=tensors[0].detach()), (self._key, source, self._at))

    def _post(self, message: _Message, lane: tuple[str, int, int]) -> _Message:
        with self._world.lock:
            waiting = self._world.mail[lane]
            if not waiting or waiting[0].sends == message.sends:
                waiting.append(message)
                return message
            other = waiting.pop(0)
        sent, received = (message, other) if message.sends else (other, message)
        with torch.no_grad():
            received.tensor.copy_(sent.tensor)
        sent.done.set()
        received.done.set()
        return message


def _same(name: str) -> Callable[..., Any]:
    """A method that is the wrapped store's. One of C++ itself would not be called."""

    def call(self: _Store, *arguments: Any) -> Any:
        return getattr(self.store, name)(*arguments)

    return call


class _Store(dist.Store):
    """A store of one rank. While it waits for a key, others compute: who waits holds the turn, or is waited for by the
    thread that does."""

    def __init__(self, store: dist.Store, world: _World) -> None:
        super().__init__()
        self.store, self.world = store, world

    set, get, multi_get, add, check = map(_same, ("set", "get", "multi_get", "add", "check"))
    deleteKey = _same("delete_key")  # noqa: N815
    set_timeout = _same("set_timeout")

    def clone(self) -> _Store:
        return self

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=TIMEOUT_SECONDS)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        self.world.turn.release()
        try:
            while not self.world.failed.is_set():
                with suppress(dist.DistStoreError):
                    return self.store.wait(keys, timedelta(seconds=PATIENCE_SECONDS))
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"wait timeout: {keys}")
        finally:
            self.world.turn.acquire()
        raise RuntimeError("another rank failed or did not come to a meeting")


class Ranks:
    """`run` as `spawn.Pool` has it, with threads."""

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `function(rank, world, *arguments, **keywords)` on `world` threads.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: if any rank raised.
        """
        if world == 1:
            return [function(0, 1, *arguments, **keywords)]
        shared, common = _World(), dist.HashStore()

        answers: list[tuple[bool, Any]] = [(False, "")] * world

        def rank_of(rank: int) -> None:
            _current.world = shared
            store = _Store(common, shared)  # C++ keeps no Python object alive
            shared.turn.acquire()
            try:
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
                answers[rank] = True, function(rank, world, *arguments, **keywords)
            except BaseException:
                shared.failed.set()
                answers[rank] = False, traceback.format_exc()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                shared.turn.release()

        hook = sys.excepthook  # which each process group wraps once more, to write the rank before each line
        _install_threaded_pg()
        _set_thread_isolation_mode(True)
        try:
            threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            _set_thread_isolation_mode(False)
            _uninstall_threaded_pg()
            sys.excepthook = hook
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            raise WorkerError("\n".join(failures))
        return [result for _, result in answers]


_current = threading.local()
"""The calling thread's world, and its replacements of attributes."""
_replaced: dict[tuple[Any, str], int] = {}
"""Attributes that some thread has replaced -> how many have."""
_replacing = threading.Lock()


@contextmanager
def replaced_here(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """`unittest.mock.patch.multiple` for functions and methods, of the calling thread alone."""
    with ExitStack() as all_of_them:
        for name, function in functions.items():
            all_of_them.enter_context(_replaced_here(owner, name, function))
        yield


@contextmanager
def _replaced_here(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    mine: dict[tuple[Any, str], Callable[..., Any]] = _current.__dict__.setdefault("functions", {})
    key = (owner, name)
    before = mine.get(key)
    with _replacing:
        _replaced[key] = _replaced.get(key, 0) + 1
        if _replaced[key] == 1:
            setattr(owner, name, _dispatching(key, getattr(owner, name)))
    mine[key] = function
    try:
        yield
    finally:
        if before is None:
            del mine[key]
        else:
            mine[key] = before
        with _replacing:
            _replaced[key] -= 1
            if not _replaced[key]:
                setattr(owner, name, getattr(owner, name).original)


def _dispatching(key: tuple[Any, str], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        mine = _current.__dict__.get("functions", {})
        if key not in mine:
            return original(*arguments, **keywords)
        function = mine.pop(key)  # what it takes for the original may be this dispatcher
        try:
            return function(*arguments, **keywords)
        finally:
            mine[key] = function

    call.original = original  # type: ignore[attr-defined]
    return call


dist.Backend.register_backend(
    BACKEND, lambda store, rank, size, timeout: ThreadGroup(rank, size, _current.world), devices=["cpu"]
)
