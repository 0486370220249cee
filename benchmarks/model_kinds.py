"""Held-out loss of the quickstart as PanGu-α and as GPT, dense and as a mixture of experts, at equal tokens.

    python -m benchmarks.model_kinds --output benchmarks/results/model_kinds.json --picture docs/recipes.svg

Each kind and seed is a process on one core, one after another; nothing of it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.experts_quality import train
from benchmarks.side_by_side import machine

KINDS = {
    "PanGu-α": ("quickstart",),
    "GPT": ("quickstart", "model.kind=gpt"),
    "PanGu-α, experts": ("quickstart_moe",),
    "GPT, experts": ("quickstart_moe", "model.kind=gpt"),
}
Curve = list[tuple[int, float]]


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw held-out losses over steps: the mean over seeds, in a band from the smallest to the largest."""
    from matplotlib.figure import Figure

    from pangu.metrics.plots import write_figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, seeds in curves.items():
        steps = [step for step, _ in seeds[0]]
        losses = [[loss for _, loss in points] for points in zip(*seeds, strict=True)]
        axes.plot(steps, [statistics.mean(each) for each in losses], marker="o", markersize=3, label=name)
        axes.fill_between(steps, [min(each) for each in losses], [max(each) for each in losses], alpha=0.2)
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(figure, path)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    words = (f"train.steps={arguments.steps}", "validation.every=50", f"lr_schedule.decay_steps={arguments.steps}")
    curves: dict[str, list[Curve]] = {}
    cores = queue.Queue[int]()
    cores.put(max(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name:
        for number, (kind, preset) in enumerate(KINDS.items()):
            for seed in arguments.seeds:
                records = train(cores, Path(name), f"{number}_{seed}", *preset, *words, f"train.seed={seed}")
                curve = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
                curves.setdefault(kind, []).append(curve)
                print(json.dumps({"model": kind, "seed": seed, "step": curve[-1][0], "validation_loss": curve[-1][1]}))
    if arguments.output:
        command = " ".join(["python -m benchmarks.model_kinds", *sys.argv[1:]])
        result = {"command": command, "machine": machine(), "seeds": arguments.seeds, "runs": curves}
        arguments.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
