"""Measures the machine that it runs on and writes a cluster file, for plans: matmuls over the shapes of the presets,
attention, memory-bound operations, the minimum time of a kernel launch, collectives over sizes, and how much compute
and communication slow each other down. Takes less than five minutes. --from corrects the cluster file of a profiled run
instead, and measures nothing."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import yaml

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.calibration.clock import Clock
from pangu.calibration.machine import measure_machine
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, allocating, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import NewFile
from pangu.config.cluster import ClusterConfig
from pangu.metrics.devices import device_here
from pangu.planning.cost import matmul_seconds
from pangu.report.clusters import cluster_names, cluster_of_device, load_cluster
from pangu.report.correction import ProfiledRun
from pangu.schedule.spans import Matmul
from pangu.topology.launch import Launch, choose_device, is_first_process

_EXAMPLE = """example:
  torchrun --nproc-per-node=8 tools/calibrate.py --output mine.yaml
  torchrun --nproc-per-node=2 tools/calibrate.py --output mine.yaml --quick
  python tools/calibrate.py --from runs/mine --output mine.yaml

Links between nodes are measured where the processes are on several (torchrun --nnodes); what is not measured is
taken from the --like file and marked as borrowed.
"""
_CLUSTERS = Path(__file__).resolve().parent.parent / "configs" / "cluster"
_HEAD = "# Measured by tools/calibrate.py on "


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.yaml", help="cluster file to write")
    parser.add_argument(
        "--like",
        default="",
        metavar="NAME",
        help="cluster in configs/cluster/ that provides the values that are not measured",
    )
    parser.add_argument("--quick", action="store_true", help="measure only a few shapes, once each, as a test")
    parser.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN",
        help="correct the cluster of a finished run (cluster=NAME profile=true) with its profile; measure nothing",
    )
    options = parser.parse_args(arguments)
    if options.run is not None and (options.quick or options.like):
        parser.error("--from measures nothing: leave out --quick and --like")
    return options


def calibrate(options: argparse.Namespace) -> None:
    """Measure, and let the first process write the file. Raises UserError."""
    launch = Launch.from_environment()
    device = choose_device("auto", launch)
    base = _borrowed(options.like, launch)
    new = _begin(options.output) if launch.rank == 0 else None
    try:
        if launch.world > 1:
            dist.init_process_group(dist.get_default_backend_for_device(device))
        where = f"rank {launch.rank} on {socket.gethostname()} ({device})"
        with allocating(lambda: where, "end other programs that use this memory, then measure again"):
            clock = Clock(device, options.quick, launch.local_world)
            cluster, notes = measure_machine(clock, base, launch, options.quick, _CLUSTERS.parent)
        if new is not None:
            _write(options.output, new, replace(cluster, name=options.output.stem), notes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if new is not None:
            new.close()


def correct(folder: Path, output: Path) -> None:
    """Write the corrected cluster file of a profiled run, and print the parts of its step. Raises UserError."""
    new = _begin(output)
    try:
        profiled = ProfiledRun.read(folder)
        cluster = replace(profiled.corrected(), name=output.stem)
        rows = profiled.rows(cluster)
        source = f"the run {folder.resolve().name!r}, {time.strftime('%Y-%m-%d')}"
        head = f"{_HEAD}{source}: figures of {profiled.cluster.name}, corrected.\n"
        with writing(output):
            new.file.write((head + yaml.safe_dump(asdict(cluster), sort_keys=False)).encode())
            new.finish()
            new.publish()
    finally:
        new.close()
    print(f"{'seconds':<12}{'forecast':>12}{'measured':>12}{'ratio':>8}{'corrected':>12}")
    for part, forecast, measured, corrected in rows:
        ratio = f"{measured / forecast:.2f}" if forecast else "-"
        print(f"{part:<12}{forecast:>12.4g}{measured:>12.4g}{ratio:>8}{corrected:>12.4g}")
    print(advice(output))


def advice(output: Path) -> str:
    """Return how to use a cluster file that was written."""
    return f"{output}: to plan and forecast with it, set {shlex.quote(f'cluster={output}')}"


def _begin(path: Path) -> NewFile:
    """The file before anything is measured, which takes minutes. Raises UserError if there cannot be one."""
    if path.suffix != ".yaml" or path.stem.startswith("."):
        raise UserError(f"--output {path}: must be a file NAME.yaml, for cluster=NAME.yaml; use e.g. mine.yaml")
    with writing(path):
        if path.exists() and not path.read_bytes().startswith(_HEAD.encode()):
            raise UserError(f"--output {path}: exists and was not written by this tool; use another name")
        return NewFile(path)


def _borrowed(like: str, launch: Launch) -> ClusterConfig:
    """Return the figures that are not measured, of the file `like` or of the device's. Raises UserError."""
    names, device = cluster_names(_CLUSTERS, whole=True), device_here(launch)
    if like and like not in names:
        raise UserError(f"--like {like}: no such file; use one of {', '.join(names)}")
    named = None if device is None else cluster_of_device(device.name, names)
    base = load_cluster(_CLUSTERS / f"{like or named or 'a100'}.yaml")
    gib = base.memory.gib if device is None else device.total_memory / 2**30
    return replace(base, memory=replace(base.memory, gib=gib))


def _write(path: Path, new: NewFile, cluster: ClusterConfig, borrowed: Sequence[str]) -> None:
    """Write the file, and say how well the model follows the matmuls that were timed."""
    plain = replace(cluster, matmul=replace(cluster.matmul, measured=()))
    errors = []
    for rows, columns, depth, share in cluster.matmul.measured:
        shape = Matmul(int(rows), int(columns), int(depth))
        errors.append(abs(matmul_seconds(shape, plain) * share * cluster.matmul.tflops * 1e12 / shape.flops - 1))
    head = (
        f"{_HEAD}{os.uname().nodename}, {time.strftime('%Y-%m-%d')}, torch "
        f"{torch.__version__}.\n# Borrowed, not measured: {', '.join(borrowed)}.\n"
    )
    with writing(path):
        new.file.write((head + yaml.safe_dump(asdict(cluster), sort_keys=False)).encode())
        new.finish()
        new.publish()
    print(
        f"{path}: {len(errors)} matmuls at up to {cluster.matmul.tflops:.3g} TFLOP/s (the model without the table is "
        f"{median(errors):.1%} off), memory {cluster.memory.gb_s * cluster.memory.efficiency:.3g} GB/s, kernels "
        f"{cluster.launch_us:.3g} us, links {cluster.inside.latency_us:.3g} us + {cluster.inside.gb_s:.3g} GB/s; "
        f"borrowed: {', '.join(borrowed)}"
    )
    print(advice(path))


def run(options: argparse.Namespace) -> None:
    """Measure this machine, or correct the cluster of a run."""
    if options.run is None:
        calibrate(options)
    elif is_first_process():  # others would write the same file
        correct(options.run, options.output)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)), is_first_process)


if __name__ == "__main__":
    sys.exit(main())
