"""The distinct roles of a run's ranks, each carried out in a process of its own kind, as many at a time as cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pangu.config.cluster import DeviceMemoryConfig
from pangu.config.cores import available_cores
from pangu.config.errors import UserError
from pangu.data.progress import ProgressBar
from pangu.dryrun.cache import cache_folder, identify, read_cached, write_cached
from pangu.topology.layout import Coordinates, Layout

REPORT_SECONDS = 30.0
"""Time between lines about the progress of dry runs where no bar can be drawn: in the log of a batch job."""


class DryRunError(UserError):
    """A rank could not be carried out without its device."""


def role_ranks(layout: Layout, every: bool) -> list[int]:
    """One rank of each stage; with `every` the first and the last of those that share matrices, of those that share
    sequences, and of the replicas."""
    sizes = (layout.data, layout.tensor, layout.context)
    ends = [{0, size - 1} if every else {0} for size in sizes]
    places = [Coordinates(stage, *place) for stage in range(layout.pipeline) for place in product(*ends)]
    return sorted({layout.rank(place) for place in places})


def run_jobs(jobs: Sequence[tuple[Any, ...]], **options: Any) -> Iterator[dict[str, Any]]:
    """What `Worker.report` says of each composed configuration and rank, as soon as it and all before it are done;
    `options` as there, and a job may have more of its own behind its rank.

    Raises:
        DryRunError: if a rank cannot be carried out.
    """
    waiting: SimpleQueue[Worker] = SimpleQueue()
    workers = [_kept.pop() if _kept else Worker() for _ in range(min(available_cores(), len(jobs)))]
    for worker in workers:
        waiting.put(worker)

    def report(job: tuple[Any, ...]) -> dict[str, Any]:
        worker, (values, rank, *own) = waiting.get(), job
        try:
            return worker.report(values, rank, **options, **dict(*own))
        finally:
            waiting.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            yield from pool.map(report, jobs)
            if _kept is not None:
                _kept.extend(workers)
                workers = []
        finally:  # before the pool waits for what is being carried out
            for worker in workers:
                worker.end()


_kept: list[Worker] | None = None
"""Idle processes for the next jobs; None: processes end with their jobs."""


@contextmanager
def kept_workers() -> Iterator[None]:
    """Let all jobs within the block share processes, since each takes seconds to start."""
    global _kept
    outer, _kept = _kept, []
    try:
        yield
    finally:
        for worker in _kept:
            worker.end()
        _kept = outer


def require_device(report: Mapping[str, Any]) -> None:
    """Raise a DryRunError for the report of a CPU, whose counts and memory are not those of a device."""
    if report["device"] is not None:
        raise DryRunError(f"the dry run is unavailable: {report['device']}")


def with_progress(
    reports: Iterable[dict[str, Any]], total: int, note_progress: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield the reports of `total` jobs, and show how many are done. Raises DryRunError as `require_device`."""
    description = f"{'counting':<12} what layers do, in {total} dry runs"
    with ProgressBar(show=True, note_progress=note_progress) as bar:
        if not bar.console.is_terminal:
            bar.console.print(description)
        task, said = bar.add_task(description, total=total), time.monotonic()
        for count, report in enumerate(reports, 1):
            require_device(report)
            bar.note_progress()
            bar.advance(task)
            if not bar.console.is_terminal and time.monotonic() - said > REPORT_SECONDS:
                said = time.monotonic()
                bar.console.print(f"{'counting':<12} {count} of {total} dry runs are done")
            yield report


def measured_gib(
    jobs: Sequence[tuple[Mapping[str, Any], int]],
    memory: DeviceMemoryConfig,
    note_progress: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the GiB that a device needs for a composed configuration and rank, each found by a dry run and then kept
    in the user's cache folder.

    Raises:
        DryRunError: if a rank cannot be carried out.
    """
    files = [cache_folder() / f"peak-{identify([values, rank])}.json" for values, rank in jobs]
    known = {file: read_cached(file) for file in files}
    missing = {file: job for file, job in zip(files, jobs, strict=True) if known[file] is None}
    if missing:
        described = [({**values, "dry_run": True}, rank) for values, rank in missing.values()]
        for file, report in zip(missing, with_progress(run_jobs(described), len(missing), note_progress), strict=True):
            known[file] = {"peak": report["peak"], "groups": report["groups"]}
            write_cached(file, known[file])
    return [known[file]["peak"] / 2**30 + memory.overhead_gib(known[file]["groups"]) for file in files]


def environment() -> dict[str, str]:
    """Variables of a process that carries out ranks."""
    one_device = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}  # and no process opens a real one
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **one_device}


class Worker:
    """A process in which torch finds the fake device: it must be there before torch is imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pangu.dryrun"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(),
        )
        self._said: deque[str] = deque(maxlen=20)
        """Its last lines of standard error, which is read at once: a full pipe would stop it."""
        self._listener = Thread(target=self._said.extend, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    def report(self, values: Mapping[str, Any], rank: int, **options: Any) -> dict[str, Any]:
        """What `run.RankReport` says of a rank, and under `device` why there is no fake one, if so. `options` are those
        of `run.dry_run`. Raises DryRunError if the rank cannot be carried out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # what it has said tells why
            self._process.stdin.write(f"{json.dumps([values, rank, options])}\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise DryRunError(f"the dry run of rank {rank} failed: {answer['error']}")
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._last_words()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._listener.join(1.0)  # what the process has started may still be there
        said = [line.strip() for line in self._said if line.strip()]
        return said[-1] if said else f"its process ended with status {status}"
