"""Dry runs of ranks in processes of their own, as many at a time as there are cores."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import cached_property
from multiprocessing import Pipe, get_context
from typing import Any
from unittest.mock import patch

from pangu.common.cores import available_cores
from pangu.common.errors import UserError
from pangu.config.cluster import DeviceMemoryConfig
from pangu.dryrun import worker
from pangu.dryrun.cache import cache_folder, identify, read_cached, write_cached
from pangu.metrics.progress import ProgressBar
from pangu.metrics.text import quantity

REPORT_SECONDS = 30.0
"""Seconds between progress lines of dry runs where no progress bar can be drawn: in the log of a batch job."""
Job = tuple[Mapping[str, Any], int, Mapping[str, Any]]
"""Configuration, rank, and options of `run.dry_run` or `measure.measure`."""


class DryRunError(UserError):
    """Error of a rank that cannot be carried out without its device."""


def run_jobs(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Yield the `run.RankReport` of each job in order; `device` tells why there is no fake device, if so.

    Raises:
        DryRunError: if a rank cannot be carried out.
    """
    with kept_workers() as workers:
        # spawned processes would import the command of this one, and torch with it
        with patch.multiple(sys.modules["__main__"], create=True, __spec__=None, __file__=None):
            reports = workers.pool.map(worker.answer, *zip(*jobs, strict=True))
        for _, rank, _ in jobs:
            try:
                report = next(reports)
            except BrokenProcessPool:
                report = {"error": workers.last_line()}
            if "error" in report:
                raise DryRunError(f"the dry run of rank {rank} failed: {report['error']}; only parallel=auto needs one")
            yield report


class Workers(ExitStack):
    """Processes in which torch finds the fake device, as many as there are cores; none starts before the first job."""

    on_progress: Callable[[], None]
    """Function that `run_with_progress` calls after each job."""

    @cached_property
    def pool(self) -> ProcessPoolExecutor:
        """Pool of the processes; they end as soon as the other end of their connection is closed."""
        self._output = self.enter_context(tempfile.NamedTemporaryFile("r", errors="replace"))  # noqa: SIM115
        alive, own = Pipe(duplex=False)
        pool = ProcessPoolExecutor(available_cores(), get_context("spawn"), worker.start, (alive, self._output.name))
        self.callback(pool.shutdown, cancel_futures=True)
        self.callback(own.close)  # first: nobody waits for running jobs
        return pool

    def last_line(self) -> str:
        """Return the last line that a process has written, or that there is none."""
        said = [line.strip() for line in self._output if line.strip()]
        return said[-1] if said else "its process was killed, perhaps as the machine has too little memory"


_workers: Workers | None = None
"""Processes of the surrounding `kept_workers`, if any."""


@contextmanager
def kept_workers(on_progress: Callable[[], None] = lambda: None) -> Iterator[Workers]:
    """Let all jobs within the block share processes, since each takes seconds to start, and report progress."""
    global _workers
    if _workers is not None:
        yield _workers
        return
    try:
        with Workers() as _workers:
            _workers.on_progress = on_progress
            yield _workers
    finally:
        _workers = None


def run_with_progress(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Yield the reports of `run_jobs`, and show its progress.

    Raises:
        DryRunError: for a report from a CPU, whose counts and memory differ from a device's.
    """
    total = len(jobs)
    description = f"{'counting':<12} operations of the layers, in {quantity(total, 'dry run')}"
    with kept_workers() as workers, ProgressBar(show=True, on_progress=workers.on_progress) as bar:
        if not bar.console.is_terminal:
            bar.console.print(description)
        said = time.monotonic()
        for count, report in enumerate(bar.track(run_jobs(jobs), total, description=description), 1):
            if report["device"] is not None:
                raise DryRunError(f"the dry run is unavailable: {report['device']}")
            bar.on_progress()
            if not bar.console.is_terminal and time.monotonic() - said > REPORT_SECONDS:
                said = time.monotonic()
                bar.console.print(f"{'counting':<12} {count} of {quantity(total, 'dry run')} done")
            yield report


def measured_gib(jobs: Sequence[tuple[Mapping[str, Any], int]], memory: DeviceMemoryConfig) -> list[float]:
    """Return the GiB a device needs per (configuration, rank), dry-run and cached; raise DryRunError on failure."""
    files = [cache_folder() / f"peak-{identify([values, rank])}.pickle" for values, rank in jobs]
    known = {file: read_cached(file) for file in files}
    missing = {file: job for file, job in zip(files, jobs, strict=True) if known[file] is None}
    if missing:
        described: list[Job] = [({**values, "dry_run": True}, rank, {}) for values, rank in missing.values()]
        for file, report in zip(missing, run_with_progress(described), strict=True):
            known[file] = {"peak": report["peak"], "groups": report["groups"]}
            write_cached(file, known[file])
    return [known[file]["peak"] / 2**30 + memory.overhead_gib(known[file]["groups"]) for file in files]
