"""Gain in loss of a mixture of experts at equal FLOPs per token, and how each balancing method spreads the tokens.

    python -m benchmarks.experts_quality --output benchmarks/results/experts_quality.json --picture docs/experts.svg

Trains `quickstart` and `quickstart_moe` on the same samples, then the beginning of `quickstart_moe` with each
`model.router.balance`. All in processes on one core, `--workers` at a time; nothing of it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import machine

ROOT = Path(__file__).resolve().parent.parent
QUALITY = {"dense": "quickstart", "experts": "quickstart_moe"}
BALANCE = ("none", "sequence", "global", "bias")
LAST = 50
"""Steps that a method's loads are the mean of."""
SUMMARY = ("last_load", "last_least_load", "validation_loss")


def train(cores: queue.Queue[int], folder: Path, name: str, preset: str, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run, in `folder/name`, on one of the `cores` that are free."""
    command = [sys.executable, "pretrain.py", f"+config={preset}", *overrides]
    command += [f"train.output={folder / name}", "train.device=cpu"]
    if not any(word.startswith("data.train=") for word in overrides):
        command += [f"data.folder={folder / 'data'}"]
    command += ["model.attention=reference", "precision.fp32_matmul=highest"]
    core = cores.get()
    # a process has as many threads as cores
    subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    cores.put(core)
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def balance_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest and the smallest load of an expert over the mean of its layer: of each step, and in the last ones."""
    loads = {name: [record["experts"][name] for record in records] for name in ("load", "least_load")}
    last = {f"last_{name}": round(statistics.mean(values[-LAST:]), 3) for name, values in loads.items()}
    held_out = [record["validation_loss"] for record in records if "validation_loss" in record]
    return {**last, "validation_loss": held_out[-1], **loads}


def draw(quality: dict[str, Any], balance: dict[str, Any], path: Path) -> None:
    """Held-out losses of both models, and the largest loads of each method."""
    from matplotlib.figure import Figure

    from pangu.metrics.plots import write_figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, row in quality.items():
        left.plot(*zip(*row["validation"], strict=True), marker="o", markersize=3, label=f"{name} ({QUALITY[name]})")
    left.set(xlabel="step", ylabel="held-out loss")
    for name, row in balance.items():
        right.plot(range(1, len(row["load"]) + 1), row["load"], linewidth=1, label=name)
    right.set(xlabel="step", ylabel="largest load of an expert / mean")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    write_figure(figure, path)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1850, help="of each of both models")
    parser.add_argument("--balance-steps", type=int, default=400, help="of each method of balance")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    schedule = f"lr_schedule.decay_steps={arguments.steps}"
    of_quality = (f"train.steps={arguments.steps}", "validation.every=100", schedule)
    of_balance = (f"train.steps={arguments.balance_steps}", f"validation.every={arguments.balance_steps}", schedule)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.workers) as pool:
        folder, cores = Path(name), queue.Queue[int]()
        for core in sorted(os.sched_getaffinity(0))[-arguments.workers :]:
            cores.put(core)
        train(cores, folder, "first", "quickstart", "train.steps=1", "validation.every=0")  # which prepares the data
        runs = {kind: pool.submit(train, cores, folder, kind, preset, *of_quality) for kind, preset in QUALITY.items()}
        methods = {
            method: pool.submit(
                train, cores, folder, method, "quickstart_moe", f"model.router.balance={method}", *of_balance
            )
            for method in BALANCE
        }
        quality = {
            kind: {"validation": [(r["step"], r["validation_loss"]) for r in run.result() if "validation_loss" in r]}
            for kind, run in runs.items()
        }
        balance = {method: balance_of(run.result()) for method, run in methods.items()}
    for kind, row in quality.items():
        print(
            json.dumps({"model": kind, "step": row["validation"][-1][0], "validation_loss": row["validation"][-1][1]})
        )
    for method, row in balance.items():
        print(json.dumps({"balance": method, **{name: row[name] for name in SUMMARY}}))
    if arguments.output:
        result = {
            "command": " ".join(["python -m benchmarks.experts_quality", *sys.argv[1:]]),
            "machine": machine(),
            "quality": quality,
            "balance": balance,
        }
        arguments.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(quality, balance, arguments.picture)


if __name__ == "__main__":
    main()
