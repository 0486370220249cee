"""Cost of finding and surviving faults: steps of one run with and without it (two gloo replicas).

    python -m benchmarks.faults --output benchmarks/results/faults.json

Whole runs differ from each other by more than that cost, so steps are compared with their neighbors in the same run. In
16 steps, what works in every step (`faults.verify_weights`, the norms that `faults.recheck` needs, the watch of
`faults.straggler_every`) is on in those with an o, and what is periodic (a comparison of compute times, a copy of the
state in memory that is sent to another node, a recheck) comes at the end of step 15 and the beginning of step 0:

    step   ... 11 12 13 14 15  0  1  2  3  4  5  6  7  8  9 10 11 12 ...
    on          o        o  o |      o  o        o  o        o  o
                              periodic

A pair is two steps that are on less the two between them, so that a steady drift cancels; 16 steps have three. A
periodic cost is the time of steps 15 to 2 less half of the four before and the four after. The cost of a step with a
period of 100 is the median of the pairs, and 1 % of the median of the periodic ones, over the median of the steps that
are off; its 95 % interval is a bootstrap over the 16 steps. All this is given for the clock and for the processor time
of all threads of both ranks. Words such as parallel.zero=3 are for all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side_by_side import machine

PERIOD, EVERY = 100, 16
"""Steps between what is periodic: those that the cost is given for, and those of the run that is measured."""
TIMES = "BENCHMARK_TIMES"
"""Environment variable of a rank: folder for its times."""
WORDS = [
    *("+config=quickstart", "data=synthetic", "model.layers=4", "model.vocab=1024", "batch.global_size=8"),
    *("batch.micro_size=1", "validation.every=0", "train.device=cpu", "checkpoint.every=0", "sample.tokens=0"),
    *("metrics.tensorboard=false", "metrics.every=100000", "parallel.zero=1", "train.deterministic=true"),
    *("faults.verify_weights=true", f"faults.recheck={EVERY}", f"faults.straggler_every={EVERY}"),
    f"checkpoint.memory_every={EVERY}",
]
SIZES = {
    "hidden 192, 8 x 128 tokens": (8.0, ["model.hidden=192", "model.heads=4", "model.sequence=128"]),
    "hidden 512, 8 x 128 tokens": (1.5, ["model.hidden=512", "model.heads=8", "model.sequence=128"]),
    "hidden 192, 8 x 512 tokens": (1.8, ["model.hidden=192", "model.heads=4", "model.sequence=512"]),
    "hidden 512, 8 x 512 tokens": (0.4, ["model.hidden=512", "model.heads=8", "model.sequence=512"]),
}
"""Steps per second, about, and words of a model. `train_step` has 8 sequences of 512 tokens, too."""


def run(words: list[str]) -> dict[str, np.ndarray]:
    """Return the clock and the processor time of both ranks [steps] that each step takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        line = [sys.executable, "scripts/launch.py", "--nproc-per-node=2", "benchmarks/faults.py", *WORDS, *words]
        environment = os.environ | {"PYTHONPATH": str(Path.cwd()), TIMES: folder}
        done = subprocess.run(
            [*line, f"train.output={folder}/run"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        ranks = [np.array(json.loads((Path(folder) / f"{rank}.json").read_text())) for rank in (0, 1)]
    processor, clock = np.moveaxis(np.diff(ranks, axis=1, prepend=np.nan), 2, 0)
    return {"clock": clock.mean(0), "processor": processor.sum(0)}


def take_part(folder: Path) -> None:
    """Be a rank of a run, on a node of its own, and write the processor time and the clock after each step."""
    from pangu.pretrain import main as pretrain
    from pangu.training.loop import Loop

    times: list[tuple[float, float]] = []
    make_step, kept = Loop._train_step, dict[str, Any]()

    def timed(loop: Loop, *arguments: Any) -> None:
        trainer, is_on = loop.trainer, loop.trainer.step % 4 in (2, 3)
        sums = kept.setdefault("sums", trainer.parameters.unsharder.sums)
        trainer.parameters.unsharder.sums = sums if is_on else None
        loop.devices.repeats = trainer.mesh.recorder.watches = is_on
        make_step(loop, *arguments)
        times.append((time.process_time(), time.perf_counter()))

    Loop._train_step = timed
    os.environ["PANGU_MEMORY"] = str(folder / "memory" / os.environ["RANK"])
    pretrain()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(times))


def percent(periods: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the costs of a step in percent [samples]: in every step, and of what is periodic.

    Args:
        periods: Times [periods, 16]; the first period is only a neighbor of the next.
        indices: Periods of each sample, counted without the first one [samples, periods].
    """
    before, this = periods[:-1], periods[1:]
    pairs = this[:, 3:15].reshape(-1, 3, 4)
    pairs = (pairs[..., 0] - pairs[..., 1] - pairs[..., 2] + pairs[..., 3]) / 2
    event = before[:, 15] + this[:, :3].sum(1) - (before[:, 11:15] + this[:, 3:7]).sum(1) / 2
    off = np.median(this[:, [4, 5, 8, 9, 12, 13]][indices], (1, 2)) / 100
    return np.median(pairs[indices], (1, 2)) / off, np.median(event[indices], 1) / PERIOD / off


def summary(periods: np.ndarray) -> dict[str, Any]:
    """Return the median step, and the costs of a step in percent with 95 % intervals: [cost, lower, upper]."""
    count = len(periods) - 1
    drawn = np.random.default_rng(0).integers(count, size=(2000, count))
    median, samples = percent(periods, np.arange(count)[None]), percent(periods, drawn)
    rows = [np.concatenate(one) for one in zip(median, samples, strict=True)]
    named = {"every_step": rows[0], "periodic": rows[1], "everything": rows[0] + rows[1]}
    costs = {name: [row[0], *np.percentile(row[1:], (2.5, 97.5))] for name, row in named.items()}
    rounded = {name: np.round(cost, 3).tolist() for name, cost in costs.items()}
    return {"step_s": np.nanmedian(periods), "percent": rounded}


def main() -> None:
    """Measure, print rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="of each run, about")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows = []
    for size, (steps_per_s, model) in SIZES.items():
        periods = max(4, round(options.seconds * steps_per_s / EVERY))
        steps = run([*model, *options.words, f"train.steps={periods * EVERY}"])
        rows.append({"size": size, "model": model, "periods": periods})
        rows[-1] |= {kind: summary(one.reshape(-1, EVERY)) for kind, one in steps.items()}
        print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        command = " ".join(["python -m benchmarks.faults", *sys.argv[1:]])
        result = {"command": command, "words": WORDS, "machine": machine(), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if TIMES in os.environ:
        take_part(Path(os.environ[TIMES]))
    else:
        main()
