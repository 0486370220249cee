"""Cost of finding and surviving faults: runs with everything on beside runs with everything off (two gloo replicas).

    python -m benchmarks.faults --output benchmarks/results/faults.json

On are `faults.verify_weights`, `faults.recheck=100`, comparisons of compute times and copies of the state in memory,
both every 100 steps; off is none of them. The runs alternate, and a row is the median over repeats of the ratio to the
run of the same repeat with everything off (above 1: slower), with the smallest and largest one, over 100 steps. It is
given for the processor time of all threads of both ranks, which depends less on other programs on the machine and
includes work that is hidden behind the steps, and for the step time. Another run of each counts the operators that
torch dispatches per step in the training thread of rank 0. Words such as parallel.zero=3 are for all runs.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.side_by_side import machine

PERIOD = 100
TIMES = "BENCHMARK_TIMES"
"""Environment variable of a rank: folder for its times."""
COUNTS = "BENCHMARK_COUNTS"
"""Environment variable of a rank: whether it counts operators, which takes time."""
WORDS = [
    *("+config=quickstart", "data=synthetic", "model.layers=4", "model.hidden=192", "model.heads=4"),
    *("model.sequence=128", "model.vocab=1024", "batch.global_size=8", "batch.micro_size=1", "validation.every=0"),
    *("train.device=cpu", "checkpoint.every=0", "sample.tokens=0", "metrics.tensorboard=false", "parallel.zero=1"),
    *("train.deterministic=true", "metrics.every=1000", f"train.steps={PERIOD + 10}"),
]
EVERY = [
    "faults.verify_weights=true",
    f"faults.recheck={PERIOD}",
    f"faults.straggler_every={PERIOD}",
    f"checkpoint.memory_every={PERIOD}",
]
PEERS = {
    "off": ["faults.straggler_every=0"],
    "verify_weights": ["faults.straggler_every=0", EVERY[0]],
    "everything": EVERY,
}


class Operators(TorchDispatchMode):
    """Counter of the operators that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Count an operator and carry it out."""
        self.count += 1
        return operator(*arguments, **(keywords or {}))


def run(words: list[str], counts: bool = False) -> tuple[float, float, float]:
    """Return what a step takes over a run's last period: both ranks' processor time, step time, rank 0's operators."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "scripts/launch.py", "--nproc-per-node=2", "benchmarks/faults.py", *WORDS, *words]
        environment = os.environ | {"PYTHONPATH": str(Path.cwd()), TIMES: folder} | ({COUNTS: "1"} if counts else {})
        done = subprocess.run(
            [*line, f"train.output={folder}/run"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        steps = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    of_processor, of_clock, operators = (
        [(times[-1][kind] - times[-1 - PERIOD][kind]) / PERIOD for times in steps] for kind in range(3)
    )
    return sum(of_processor), max(of_clock), operators[0]


def take_part(folder: Path) -> None:
    """Be a rank of a run, and write the processor time and the clock after each step."""
    from pangu.pretrain import main as pretrain
    from pangu.training.loop import Loop

    times: list[tuple[float, float, int]] = []
    make_step, operators = Loop._train_step, Operators()

    def timed(loop: Loop, *arguments: Any) -> None:
        with operators if COUNTS in os.environ else nullcontext():
            make_step(loop, *arguments)
        times.append((time.process_time(), time.perf_counter(), operators.count))

    Loop._train_step = timed  # type: ignore[method-assign]
    pretrain()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(times))


def measure(repeats: int, words: list[str]) -> list[dict[str, Any]]:
    """Return a row for each peer."""
    operators = {peer: run([*keys, *words], counts=True)[2] for peer, keys in PEERS.items()}
    print(operators, flush=True)
    times: dict[str, list[tuple[float, float, float]]] = {peer: [] for peer in PEERS}
    for repeat in range(repeats):
        for peer in list(PEERS)[:: 1 if repeat % 2 else -1]:
            times[peer].append(run([*PEERS[peer], *words]))
            print(peer, *times[peer][-1][:2], flush=True)
    rows = []
    for peer, seconds in times.items():
        row: dict[str, Any] = {"peer": peer, "operators": operators[peer]}
        row["operators_ratio"] = operators[peer] / operators["off"]
        for kind, name in enumerate(("processor", "step")):
            ratios = sorted(one[kind] / off[kind] for one, off in zip(seconds, times["off"], strict=True))
            row[f"{name}_ratio"] = [statistics.median(ratios), ratios[0], ratios[-1]]
            row[f"{name}_s"] = statistics.median(one[kind] for one in seconds)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows = measure(options.repeats, options.words)
    if options.output is not None:
        command = " ".join(["python -m benchmarks.faults", *sys.argv[1:]])
        result = {"command": command, "words": WORDS, "peers": PEERS, "repeats": options.repeats, "machine": machine()}
        options.output.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if TIMES in os.environ:
        take_part(Path(os.environ[TIMES]))
    else:
        main()
