"""The one multi-process helper of the suite: a pool of workers that live for the whole session.

Importing torch takes seconds, so the workers are started once and every job only opens a process group of its own size.

    results = pool.run(2, function, *arguments)    # function(rank, world, *arguments) on 2 gloo processes

`function` must be importable (defined at the top of a test module) and its results must be picklable.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300.0
PATIENCE_SECONDS = 20.0


class WorkerError(AssertionError):
    """A job failed on some ranks; the message holds their tracebacks."""


def fork_server() -> ForkServerContext:
    """Starts processes that have imported what a run imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def free_port() -> int:
    """Return a port for a server that starts later. Until then no other socket gets it from the system, which hands out
    those from 32768 on (Linux), or higher ones."""
    while True:
        port = 10000 + secrets.randbelow(20000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


@dataclass(frozen=True)
class Program:
    """What some ranks did."""

    statuses: list[int | None]
    """Exit status of each rank; None: it was killed here, because it did not end in time."""
    stdout: str
    stderr: str
    """Of all ranks, one after another."""

    @property
    def returncode(self) -> int:
        """0 if all ranks ended well, otherwise the status of one that did not."""
        return next((-1 if status is None else status for status in self.statuses if status != 0), 0)


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Program:
    """Call `function(*arguments)`, which may end the process, on `world` processes with the variables of torchrun. As
    torchrun does, it ends the others soon after one has failed."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork_server().Process(
                target=_rank, args=(sys.path, Path(folder), rank, world, port, function, arguments), daemon=True
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        statuses = _statuses(ranks, timeout)
        said = [
            "".join((Path(folder) / f"{rank}.{name}").read_text(encoding="utf-8") for rank in range(world))
            for name in ("out", "err")
        ]
    return Program(statuses, *said)


def _statuses(ranks: list[ForkServerProcess], timeout: float) -> list[int | None]:
    """Waits for processes, ends those that are left, and returns how each ended."""
    deadline = time.monotonic() + timeout
    told = False
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks) and not told:
            told, deadline = True, time.monotonic() + PATIENCE_SECONDS
            multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], 1.0)
            for process in ranks:
                process.terminate()
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], 0.2)
    statuses = [None if process.is_alive() else process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return statuses


def _rank(
    path: list[str],
    folder: Path,
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    variables: dict[str, object] = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    use_one_core()
    redirect(folder / f"{rank}.out", 1)
    redirect(folder / f"{rank}.err", 2)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def use_one_core() -> None:
    """Have this process, and those that it forks, compute on one thread: tests run side by side, and small products are
    slower on several, many times where there are more threads than cores."""
    torch.set_num_threads(1)
    os.sched_getaffinity = lambda process: {0}  # which a run asks for its number of threads


def redirect(log: Path, *descriptors: int) -> None:
    """Let what this process and those that it starts say go to a file."""
    with log.open("wb") as file:
        for descriptor in descriptors:
            os.dup2(file.fileno(), descriptor)
    # the fork server's own streams may be closed
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


class Pool:
    """Workers are started when a job first needs them."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        # on any free port; over a file, making a group took seven times as long
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `function(rank, world, *arguments, **keywords)` on `world` gloo processes.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: if any rank raised or did not answer in time; the pool is then started anew.
        """
        self._grow(world)
        self._jobs += 1
        place = (self._store.port, str(self._jobs))
        job = (function.__module__, function.__qualname__, world, place, arguments, keywords)
        for rank in range(world):
            self._workers[rank][1].send((rank, *job))
        answers = [self._answer(rank) for rank in range(world)]
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            self.close()
            raise WorkerError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _grow(self, world: int) -> None:
        context = fork_server()
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._workers[rank]
        try:
            if connection.poll(TIMEOUT_SECONDS):
                return connection.recv()
        except EOFError:
            return False, f"died with status {process.exitcode}"
        return False, f"no answer within {TIMEOUT_SECONDS} s"


def _serve(connection: Connection, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _job(*job)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        if dist.is_initialized():  # after the answer: groups take long to end
            dist.destroy_process_group()


def _job(rank: int, module: str, name: str, world: int, place: tuple[int, str], arguments: Any, keywords: Any) -> Any:
    function = getattr(importlib.import_module(module), name)
    if world == 1:
        return function(rank, world, *arguments, **keywords)
    port, prefix = place
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return function(rank, world, *arguments, **keywords)


def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent
