"""Dry runs of ranks in processes of their own, as many at a time as there are cores, and of all roles of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from pangu.common.cores import available_cores
from pangu.common.errors import ConfigError, Problem, UserError
from pangu.config.cluster import DeviceMemoryConfig, cluster_in
from pangu.config.schema import RunConfig
from pangu.dryrun.cache import cache_folder, identify, read_cached, write_cached
from pangu.metrics.progress import ProgressBar
from pangu.metrics.text import quantity
from pangu.pipeline.layouts import choose_layout
from pangu.topology.layout import Coordinates, Layout

REPORT_SECONDS = 30.0
"""Seconds between progress lines of dry runs where no progress bar can be drawn: in the log of a batch job."""


class DryRunError(UserError):
    """Error of a rank that cannot be carried out without its device."""


def role_ranks(layout: Layout, every: bool) -> list[int]:
    """Return one rank per stage; with `every`, both ends of the tensor, context and data-parallel ranks of each."""
    sizes = (layout.data, layout.tensor, layout.context)
    ends = [{0, size - 1} if every else {0} for size in sizes]
    places = [Coordinates(stage, *place) for stage in range(layout.pipeline) for place in product(*ends)]
    return sorted({layout.rank(place) for place in places})


def run_jobs(jobs: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield `Worker.report` of each (configuration, rank[, options]) job in order; raise DryRunError like it."""
    count = min(available_cores(), len(jobs))
    with kept_workers() as idle, ThreadPoolExecutor(count) as pool:
        workers = [idle.pop() if idle else Worker() for _ in range(count)]
        free = workers.copy()

        def report(job: tuple[Any, ...]) -> dict[str, Any]:
            worker, (values, rank, *options) = free.pop(), job
            try:
                return worker.report(values, rank, **dict(*options))
            finally:
                free.append(worker)

        try:
            yield from pool.map(report, jobs)
            idle += workers
            workers = []
        finally:  # before the pool waits for running jobs
            for worker in workers:
                worker.end()


_idle_workers: list[Worker] | None = None
"""Idle processes for the next jobs; None outside of `kept_workers`."""


@contextmanager
def kept_workers() -> Iterator[list[Worker]]:
    """Let all jobs within the block share processes, since each takes seconds to start; yield the idle ones."""
    global _idle_workers
    if _idle_workers is not None:
        yield _idle_workers
        return
    idle = _idle_workers = list[Worker]()
    try:
        yield idle
    finally:
        _idle_workers = None
        for worker in idle:
            worker.end()


def run_with_progress(jobs: Sequence[tuple[Any, ...]], note_progress: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield the reports of `run_jobs`, and show its progress.

    Raises:
        DryRunError: for a report from a CPU, whose counts and memory differ from a device's.
    """
    total = len(jobs)
    description = f"{'counting':<12} operations of the layers, in {quantity(total, 'dry run')}"
    with ProgressBar(show=True, note_progress=note_progress) as bar:
        if not bar.console.is_terminal:
            bar.console.print(description)
        task, said = bar.add_task(description, total=total), time.monotonic()
        for count, report in enumerate(run_jobs(jobs), 1):
            if report["device"] is not None:
                raise DryRunError(f"the dry run is unavailable: {report['device']}")
            bar.note_progress()
            bar.advance(task)
            if not bar.console.is_terminal and time.monotonic() - said > REPORT_SECONDS:
                said = time.monotonic()
                bar.console.print(f"{'counting':<12} {count} of {quantity(total, 'dry run')} done")
            yield report


def measured_gib(
    jobs: Sequence[tuple[Mapping[str, Any], int]],
    memory: DeviceMemoryConfig,
    note_progress: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the GiB a device needs per (configuration, rank), dry-run and cached; raise DryRunError on failure."""
    files = [cache_folder() / f"peak-{identify([values, rank])}.json" for values, rank in jobs]
    known = {file: read_cached(file) for file in files}
    missing = {file: job for file, job in zip(files, jobs, strict=True) if known[file] is None}
    if missing:
        described = [({**values, "dry_run": True}, rank) for values, rank in missing.values()]
        for file, report in zip(missing, run_with_progress(described, note_progress), strict=True):
            known[file] = {"peak": report["peak"], "groups": report["groups"]}
            write_cached(file, known[file])
    return [known[file]["peak"] / 2**30 + memory.overhead_gib(known[file]["groups"]) for file in files]


def environment() -> dict[str, str]:
    """Return the environment variables of a dry-run process."""
    one_device = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}  # no process opens a real device
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **one_device}


class Worker:
    """Process in which torch finds the fake device, which must exist before torch is imported."""

    def __init__(self) -> None:
        """Start the process."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # a full pipe would block it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pangu.dryrun"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )

    def report(self, values: Mapping[str, Any], rank: int, **options: Any) -> dict[str, Any]:
        """Return the `run.RankReport` of a rank; `device` tells why there is no fake device, if so.

        `options` are those of `run.dry_run`. Raises DryRunError if the rank cannot be carried out.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # its standard error tells why
            self._process.stdin.write(f"{json.dumps([values, rank, options])}\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line.endswith("\n") else {"error": self._last_words()}
        if "error" in answer:
            raise DryRunError(f"the dry run of rank {rank} failed: {answer['error']}; only parallel=auto needs one")
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        return said[-1] if said else f"its process exited with status {status}"


def dry_run_roles(values: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the roles of a run, one per stage (`dry_run=all`: each distinct one).

    Args:
        values: the composed configuration as plain dictionaries.

    Returns:
        The `run.RankReport` of the device with the highest peak, its `fits` and `room_bytes` on the configuration's
        cluster (None without one), `seconds`, `compile` (not covered by a dry run), and `roles`: the same for each.

    Raises:
        UserError: if the configuration is invalid.
    """
    began = time.perf_counter()
    config, layout, _ = choose_layout(values, 1)
    require_kernels(config)
    roles = list(run_jobs([(values, rank) for rank in role_ranks(layout, config.dry_run == "all")]))
    for role in roles:
        role |= _fit(config, role)
    peak = max(roles, key=lambda role: role["needed_bytes"])
    return {**peak, "seconds": time.perf_counter() - began, "compile": config.compile, "roles": roles}


def require_kernels(config: RunConfig) -> None:
    """Raise ConfigError if the configuration requests a kernel that no dry run can carry out."""
    if config.model.attention == "flash_attn":
        rule = "a dry run cannot run a kernel of an external package"
        fix = "set model.attention=auto, which needs the same memory where both are fused"
        raise ConfigError([Problem("model.attention", config.model.attention, rule, fix)])


def _fit(config: RunConfig, role: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory that the device needs including non-tensor memory, and the room that remains."""
    if config.cluster is None:
        return {"cluster": None, "needed_bytes": role["peak"], "fits": None, "room_bytes": None}
    cluster = cluster_in(config.cluster)
    needed = role["peak"] + round(cluster.memory.overhead_gib(role["groups"]) * 2**30)
    room = round(cluster.memory.gib * 2**30) - needed
    return {"cluster": cluster.name, "needed_bytes": needed, "fits": room >= 0, "room_bytes": room}
