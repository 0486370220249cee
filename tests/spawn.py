"""The one multi-process helper of the suite: a pool of workers that live for the whole session.

Importing torch takes seconds, so the workers are started once and every job only opens a process group of its own size.

    results = pool.run(2, function, *arguments)    # function(rank, world, *arguments) on 2 gloo processes

`function` must be importable (defined at the top of a test module) and its results must be picklable.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300.0


class WorkerError(AssertionError):
    """A job failed on some ranks; the message holds their tracebacks."""


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
        context = multiprocessing.get_context("spawn")
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
