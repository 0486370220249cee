"""Idle time of the stages of a real pipeline, next to what the simulator predicts from the same durations.

    python -m benchmarks.pipeline_idle --output benchmarks/results/pipeline_idle.json

Four gloo processes, one stage each. Every step is recorded (as with `profile=true`), and the simulator is given the
mean time of each chunk's forward and backward in that very step: what it does not know of is how much single times
differ, what messages take, and that processes may share cores. A row is the median over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.pipeline import OURS
from benchmarks.side_by_side import SHAPE, fresh, machine, samples
from benchmarks.trainer import micro_batches, pangu_trainer
from pangu.schedule.simulate import bubble_by_formula, simulate
from pangu.training.profile import Profile, durations_of

STAGES = 4
LAYERS = 12
"""More than in the other benchmarks: two chunks on each of four stages."""


def idle(schedule: str, virtual_stages: int, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Measured and simulated idle share of each step."""
    torch.set_num_threads(1)
    trainer = pangu_trainer(
        "fp32",
        8192,
        f"model.layers={LAYERS}",
        f"parallel.pipeline={STAGES}",
        f"parallel.virtual_stages={virtual_stages}",
        f"parallel.schedule={schedule}",
        "batch.micro_size=1",
        f"batch.global_size={arguments.micro_batches}",
    )
    batches = micro_batches(samples(8192, arguments.micro_batches), 1)
    trainer.train_step(batches)
    timelines = []
    for _ in range(arguments.repeats):
        Profile.begin(trainer.mesh)
        trainer.forward_backward(batches)
        timelines.append(Profile.of(trainer, trainer.mesh.recorder.stop()).timeline)
    return [(line.bubble, simulate(line.schedule, durations_of(line)).bubble) for line in timelines]


def main() -> None:
    """Measure every schedule, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for schedule in arguments.schedules:
        virtual_stages = len(OURS[schedule]) // 2
        steps = fresh(STAGES, idle, schedule, virtual_stages, arguments)[0]
        formula = bubble_by_formula(schedule, STAGES, virtual_stages, arguments.micro_batches)
        rows.append(
            {
                "schedule": schedule,
                "measured": round(statistics.median(measured for measured, _ in steps), 4),
                "simulated": round(statistics.median(simulated for _, simulated in steps), 4),
                "formula_equal_times": round(formula or 0.0, 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        configuration = {key: str(value) for key, value in vars(arguments).items()}
        shape = {**SHAPE, "layers": LAYERS, "stages": STAGES, "vocab": 8192}
        result = {"shape": shape, "configuration": configuration, "machine": machine(), "rows": rows}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
