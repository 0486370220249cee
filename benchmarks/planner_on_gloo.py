"""Step times that the planner expects of random layouts, beside those of the real trainer on gloo processes.

    python -m benchmarks.planner_on_gloo --output benchmarks/results/planner_on_gloo.json

For each number of processes `tools/calibrate.py` first measures this machine with as many of them. It knows nothing of
the model. Layouts are drawn by a seed from all that the search would try: equally often from each combination of
degrees. Each round starts fresh processes, in which the layouts take their steps in turns; a measured time is the
median over the steps of all rounds, and of a step the time until the last process is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.side_by_side import fresh, machine
from benchmarks.trainer import composed, micro_batches
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.planning.find import overrides_of
from pangu.planning.program import Plan, configured
from pangu.planning.search import Space, enumerate_plans, smaller, space_of, time_of
from pangu.report.clusters import load_cluster
from pangu.report.forecast import TERMS
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import choose
from pangu.training.step import Trainer

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"layers": 8, "hidden": 256, "heads": 4, "sequence": 128, "vocab": 2048}
BATCH = 8
"""Sequences in a step."""


def configuration() -> RunConfig:
    """The small model's, without a layout."""
    fixed = ["model=gpt2_124m", "data=synthetic", "model.dropout=0", "model.attention_dropout=0", "precision=fp32"]
    shape = [f"model.{key}={value}" for key, value in SHAPE.items()]
    return build(RunConfig, composed(*fixed, *shape, "model.attention=sdpa", f"batch.global_size={BATCH}"))


def calibrated(processes: int, folder: Path) -> float:
    """Let the tool write gloo.yaml into a folder; returns the seconds that it took."""
    began = time.perf_counter()
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", str(ROOT / "tools" / "calibrate.py")]
    subprocess.run([sys.executable, *command, "--output", str(folder / "gloo.yaml")], check=True, cwd=ROOT)
    return time.perf_counter() - began


def drawn(space: Space, count: int, random: Random) -> list[Plan]:
    """So many layouts, equally many of each combination of degrees."""
    fixed = ({"offload": ()}, {"offload": (), "zero": 0})
    found = chain(*(enumerate_plans(space._replace(fixed=one), Counter()) for one in fixed))
    groups: dict[tuple[int, ...], list[Plan]] = {}
    recomputed = ((plan, *(one for one in smaller(space, plan) if not one.offload)) for plan in found)
    for plan in dict.fromkeys(chain.from_iterable(recomputed)):
        groups.setdefault((plan.tensor, plan.pipeline, plan.data), []).append(plan)
    shuffled = [random.sample(groups[degrees], len(groups[degrees])) for degrees in sorted(groups)]
    random.shuffle(shuffled)
    turns = (group[turn] for turn in range(count) for group in shuffled if turn < len(group))
    return [plan for plan, _ in zip(turns, range(count), strict=False)]


def steps_of(configs: Sequence[RunConfig], steps: int) -> list[list[float]]:
    """Seconds of so many steps of each configuration, which take turns."""
    torch.set_num_threads(1)
    trainers = [_trainer(config) for config in configs]
    size = (BATCH, SHAPE["sequence"] + 1)
    numbers = torch.randint(0, SHAPE["vocab"], size, generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in trainers]
    for step in range(steps + 1):
        for taken, trainer in zip(seconds, trainers, strict=True):
            layout, micro = trainer.mesh.layout, trainer.config.batch.micro_size
            batches = micro_batches(numbers.chunk(layout.data)[trainer.mesh.at.data], micro)
            if trainer.choices is not None:
                torch.set_float32_matmul_precision(trainer.choices["fp32_matmul"])
            dist.barrier()
            began = time.perf_counter()
            trainer.train_step(batches)
            dist.barrier()
            if step:  # the first one warms up
                taken.append(time.perf_counter() - began)
    return seconds


def _trainer(config: RunConfig) -> Trainer:
    parallel = config.parallel
    assert parallel.data is not None
    mesh = Mesh.connect(Layout.of(parallel, parallel.data), torch.device("cpu"))
    return Trainer(config, mesh, choices=choose(config, mesh))


def rows_of(processes: int, config: RunConfig, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Expected and measured times of layouts of so many processes, and the seconds of the calibration."""
    with tempfile.TemporaryDirectory() as folder:
        given = arguments.cluster
        seconds = 0.0 if given else calibrated(processes, Path(folder))
        cluster = load_cluster(given[arguments.processes.index(processes)] if given else Path(folder) / "gloo.yaml")
    space = space_of(config, replace(cluster, devices=processes, node=processes), {})
    plans = drawn(space, arguments.layouts // len(arguments.processes), Random(arguments.seed))
    space.program.prepare(plans)
    expected = [time_of(space, plan) for plan in plans]
    configs = [configured(space.config, plan) for plan in plans]
    rounds = [fresh(processes, steps_of, configs, arguments.steps)[0] for _ in range(arguments.rounds)]
    rows = []
    for number, (plan, time_) in enumerate(zip(plans, expected, strict=True)):
        taken = [one for of_round in rounds for one in of_round[number]]
        measured = statistics.median(taken)
        row = {
            "processes": processes,
            "layout": " ".join(overrides_of(plan)),
            "expected_s": round(time_.total, 4),
            "measured_s": round(measured, 4),
            "smallest_s": round(min(taken), 4),
            "largest_s": round(max(taken), 4),
            "error": round(time_.total / measured - 1, 4),
            "terms_s": {term: round(getattr(time_, term), 4) for term in TERMS},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows, seconds


def rank_correlation(rows: Sequence[dict[str, Any]]) -> float:
    """Spearman's, of expected and measured times."""
    expected, measured = (np.argsort(np.argsort([row[key] for row in rows])) for key in ("expected_s", "measured_s"))
    return float(np.corrcoef(expected, measured)[0, 1])


def main() -> None:
    """Calibrate, predict, measure; print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layouts", type=int, default=20, help="of all numbers of processes together")
    parser.add_argument("--cluster", nargs="*", type=Path, help="calibrated before, a file for each of --processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of each layout in a round")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    config = configuration()
    rows: list[dict[str, Any]] = []
    calibration, load = {}, [round(os.getloadavg()[0], 2)]
    for processes in arguments.processes:
        measured, calibration[processes] = rows_of(processes, config, arguments)
        rows += measured
    load.append(round(os.getloadavg()[0], 2))
    summary = {
        "rank_correlation": round(rank_correlation(rows), 3),
        "mean_error": round(statistics.mean(abs(row["error"]) for row in rows), 4),
    }
    print(json.dumps(summary))
    if arguments.output:
        result = {
            "command": " ".join(["python -m benchmarks.planner_on_gloo", *sys.argv[1:]]),
            "shape": {**SHAPE, "batch": BATCH, "precision": "fp32"},
            "configuration": {key: str(value) for key, value in vars(arguments).items()},
            "machine": {**machine(), "cores": len(os.sched_getaffinity(0)), "load_before_and_after": load},
            "calibration_s": {processes: round(seconds, 1) for processes, seconds in calibration.items()},
            **summary,
            "rows": rows,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
