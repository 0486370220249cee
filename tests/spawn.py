"""The one multi-process helper of the suite: a pool of workers that live for the whole session.

Importing torch takes seconds, so the workers are started once and every job only opens a process group of its own size.

    results = pool.run(2, function, *arguments)    # function(rank, world, *arguments) on 2 gloo processes

`function` must be importable (defined at the top of a test module) and its results must be picklable.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300.0


class WorkerError(AssertionError):
    """A job failed on some ranks; the message holds their tracebacks."""


class Pool:
    """Workers are started when a job first needs them."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `function(rank, world, *arguments, **keywords)` on `world` gloo processes.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: if any rank raised or did not answer in time; the pool is then started anew.
        """
        self._grow(world)
        with tempfile.TemporaryDirectory() as folder:
            job = (function.__module__, function.__qualname__, world, f"{folder}/store", arguments, keywords)
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
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, module, name, world, store, arguments, keywords = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _job(rank, module, name, world, store, arguments, keywords)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _job(rank: int, module: str, name: str, world: int, store: str, arguments: Any, keywords: Any) -> Any:
    import torch.distributed as dist

    function = getattr(importlib.import_module(module), name)
    if world == 1:
        return function(rank, world, *arguments, **keywords)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return function(rank, world, *arguments, **keywords)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent
