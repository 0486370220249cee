"""Shared parts of all benchmarks: fresh processes, interleaved repeats, rows and the file they are written to.

A row is the median over repeats of its ratio to the plain loop's step of the same repeat (above 1: faster than plain),
with the smallest and largest ratio and the peak resident set of fresh processes. In each repeat the peers come in
another order: what the one before has left in caches and in the heap would always fall to the same one. Machines are
noisy, so absolute times are kept for reference only. A process imports what its peers need, nothing else. A peak says
as much of how glibc reuses its heap as of what was held, unless blocks of tensors leave the process when they are
freed: `MALLOC_MMAP_THRESHOLD_=1000000` in the environment makes them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHAPE = {"layers": 6, "hidden": 512, "heads": 8, "sequence": 512}
PACKAGES = ("torch", "transformers", "megatron-core", "deepspeed", "emerging-optimizers")
Step = Callable[[Tensor], float]
Make = Callable[[str, str, int, int], Step]
"""(peer, precision, vocabulary, micro-batch) -> a function that makes one training step and returns the loss."""


def samples(vocab: int, batch: int) -> Tensor:
    """int64 [batch, sequence + 1], the same for all."""
    return torch.randint(0, vocab, (batch, SHAPE["sequence"] + 1), generator=torch.Generator().manual_seed(0))


def measure(make: Make, processes: int, arguments: argparse.Namespace) -> None:
    """Measure every precision and vocabulary on `processes` processes, print the rows and write them.

    Args:
        make: importable; called in every process, all of one gloo group if there are several.
        processes: that work on one step together.
        arguments: from `command_line`.
    """
    rows = []
    for precision, vocab in itertools.product(arguments.precision, arguments.vocab):
        common = (make, precision, vocab, arguments)
        timed = fresh(processes, _interleaved, *common, arguments.peers)[0][0] if arguments.repeats else None
        for peer in arguments.peers:
            if timed:
                measured: dict[str, Any] = _row(timed, peer)
            else:
                measured = {"peak_mib": [round(peak) for _, peak in fresh(processes, _interleaved, *common, [peer])]}
            rows.append({"precision": precision, "vocab": vocab, "peer": peer, **measured})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        result = {
            "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
            "shape": {**SHAPE, "sequence": arguments.sequence},
            "configuration": {key: str(value) for key, value in vars(arguments).items()},
            "environment": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
            "machine": machine(),
            "rows": rows,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def command_line(
    description: str | None,
    peers: tuple[str, ...],
    threads: int,
    vocab: tuple[int, ...] = (8192, 40000),
    micro: int = 4,
    batch: int = 8,
    sequence: int = SHAPE["sequence"],
) -> argparse.Namespace:
    """The options of a benchmark; `threads` (of a process) and what follows are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--vocab", nargs="+", type=int, default=list(vocab))
    parser.add_argument("--peers", nargs="+", choices=peers, default=list(peers), help="plain among them")
    parser.add_argument("--batch", type=int, default=batch, help="sequences in a step")
    parser.add_argument("--micro", type=int, default=micro, help="sequences in a micro-batch")
    parser.add_argument("--sequence", type=int, default=sequence, help="tokens of a sequence")
    parser.add_argument("--repeats", type=int, default=7, help="0: peaks of memory only")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def fresh(processes: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function(*arguments)` in fresh processes that form a gloo group."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(processes, mp_context=context) as pool:
        jobs = [
            pool.submit(_in_group, rank, processes, f"{folder}/store", function, *arguments)
            for rank in range(processes)
        ]
        return [job.result() for job in jobs]


def _in_group(rank: int, processes: int, store: str, function: Callable[..., Any], *arguments: Any) -> Any:
    if processes == 1:
        return function(*arguments)
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _interleaved(
    make: Make, precision: str, vocab: int, arguments: argparse.Namespace, peers: list[str]
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Wall and processor seconds of each peer's steps, and this process's peak resident set in MiB."""
    torch.set_num_threads(arguments.threads)
    SHAPE["sequence"] = arguments.sequence
    data = samples(vocab, arguments.batch)
    steps = {peer: make(peer, precision, vocab, arguments.micro) for peer in peers}
    seconds: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
    for repeat in range(arguments.warm_up + (arguments.repeats if len(peers) > 1 else 1)):
        for peer in Random(repeat).sample(peers, len(peers)):
            if dist.is_initialized():
                dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            steps[peer](data)
            if repeat >= arguments.warm_up:
                seconds[peer].append((time.perf_counter() - wall, time.process_time() - processor))
    return seconds, _peak_resident_mib()


def _row(seconds: Mapping[str, list[tuple[float, float]]], peer: str) -> dict[str, float]:
    ratios = [base / own for (base, _), (own, _) in zip(seconds["plain"], seconds[peer], strict=True)]
    return {
        "speed_ratio": round(statistics.median(ratios), 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "median_seconds": round(statistics.median(wall for wall, _ in seconds[peer]), 4),
        "median_processor_seconds": round(statistics.median(processor for _, processor in seconds[peer]), 4),
    }


def _peak_resident_mib() -> float:
    """Largest resident set of this process. Not by getrusage, whose figure outlives exec and is then the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def machine() -> dict[str, str]:
    """The processor and the versions of everything measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    words = [line for line in lines if line.startswith(("model name", "flags"))]
    found = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return {
        "processor": words[0].split(":")[1].strip(),
        "features": " ".join(word for word in words[1].split() if word.startswith(("avx512", "amx"))),
        "python": platform.python_version(),
        **{name: found[name] for name in PACKAGES if name in found},
    }
