"""Held-out loss of the quickstart with each optimizer, at equal tokens and each at the best of three learning rates.

    python -m benchmarks.optimizers --output benchmarks/results/optimizers.json --picture docs/optimizers.svg

All in processes on one core, `--workers` at a time; nothing of it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.experts_quality import train
from benchmarks.side_by_side import machine

RATES = {"adam": (0.004, 0.008, 0.016), "lamb": (0.01, 0.02, 0.04), "muon": (0.008, 0.016, 0.032)}


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """Held-out losses over steps."""
    from matplotlib.figure import Figure

    from pangu.metrics.plots import write_figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in curves.items():
        axes.plot(*zip(*row["validation"], strict=True), marker="o", markersize=3, label=f"{name}, lr {row['lr']}")
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(figure, path)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    words = (f"train.steps={arguments.steps}", "validation.every=50", f"lr_schedule.decay_steps={arguments.steps}")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.workers) as pool:
        folder, cores = Path(name), queue.Queue[int]()
        for core in sorted(os.sched_getaffinity(0))[-arguments.workers :]:
            cores.put(core)
        train(cores, folder, "first", "quickstart", "train.steps=1", "validation.every=0")  # which prepares the data
        runs = {
            (kind, rate): pool.submit(
                *(train, cores, folder, f"{kind}_{rate}", "quickstart"),
                *(f"optimizer={kind}", f"optimizer.lr={rate}", *words),
            )
            for kind, rates in RATES.items()
            for rate in rates
        }
        found = {
            at: [(r["step"], r["validation_loss"]) for r in run.result() if "validation_loss" in r]
            for at, run in runs.items()
        }
    rows = [{"optimizer": kind, "lr": rate, "validation": curve} for (kind, rate), curve in found.items()]
    curves: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["validation"][-1][1]):
        curves.setdefault(row["optimizer"], row)
    for row in rows:
        print(json.dumps({**row, "validation": row["validation"][-1]}))
    if arguments.output:
        command = " ".join(["python -m benchmarks.optimizers", *sys.argv[1:]])
        result = {"command": command, "machine": machine(), "runs": rows}
        arguments.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
