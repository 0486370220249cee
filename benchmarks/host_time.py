"""Host time of one layer: CPU time of its forward and backward pass for one micro-batch, beside a plain loop's.

    python -m benchmarks.host_time --output benchmarks/results/host_time.json

Layers have 16 columns and sequences 8 tokens, so that kernels take next to no time, and the trainer takes the branches
that it takes on a GPU: weight gradients are added to their sums by their products. A step has two micro-batches. Each
peer makes steps with few and with many layers; a layer takes the difference. All steps of a repeat follow each other
in another order each time, and a row is the median over repeats of the ratio to the plain loop's layer of the same
repeat (below 1: less host time than plain), with quartiles. It says nothing of what a launch costs a driver.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_suite.host import PEERS, TINY
from benchmarks.gpu_suite.setting import preset
from benchmarks.gpu_suite.speed import make
from benchmarks.side_by_side import machine
from pangu.training import step as training_step

LAYERS = (4, 16)
SMALLER = {"model.hidden": 16, "model.sequence": 8, "model.vocab": 64, "model.attention": "sdpa"}
MICRO_BATCHES = 2
NAMES = ("plain", "pangu", "pangu, recompute", "transformers")
WARM_UP = 3


def steps_of(names: list[str]) -> dict[tuple[str, int], Callable[[], float]]:
    """A step of each peer with few and with many layers."""
    steps = {}
    device = torch.device("cpu")
    with patch.object(training_step, "fuses_gradient_accumulation", lambda device: True):
        for name in names:
            peer, changes = PEERS[name]
            for layers in LAYERS:
                sizes = {**TINY, **SMALLER, **changes, "model.layers": layers}
                steps[name, layers] = make(peer, preset("pangu_350m", sizes), device)
    return steps


def layer_seconds(names: list[str], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of a layer and micro-batch of each peer, for each repeat."""
    steps = steps_of(names)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(WARM_UP + repeats):
        taken = {}
        for key in Random(repeat).sample(list(steps), len(steps)):
            began = time.process_time()
            steps[key]()
            taken[key] = time.process_time() - began
        for name in names if repeat >= WARM_UP else ():
            few, many = (taken[name, layers] for layers in LAYERS)
            seconds[name].append((many - few) / (LAYERS[1] - LAYERS[0]) / MICRO_BATCHES)
    return seconds


def rows_of(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each peer."""
    rows = []
    for name, own in seconds.items():
        ratios = [one / plain for one, plain in zip(own, seconds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures = {"against_plain": middle, "lower_quartile": low, "upper_quartile": high}
        microseconds = round(1e6 * statistics.median(own), 1)
        rows.append({"peer": name, **{key: round(value, 3) for key, value in figures.items()}, "us": microseconds})
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=list(NAMES), help="plain among them")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(layer_seconds(arguments.peers, arguments.repeats))
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.output:
        words = {"command": "python -m benchmarks.host_time", "repeats": arguments.repeats, "layers": LAYERS}
        result = {**words, "machine": machine(), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
