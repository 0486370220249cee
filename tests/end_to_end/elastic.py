"""A run under torchrun's elastic agents that goes on with 4, then 2, then 3 processes, beside the unbroken run.

python -m tests.end_to_end.elastic docs/elastic.svg    # draws both loss curves
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pangu.prepare.indexed_writer import IndexedWriter
from tests.end_to_end.commands import kill_all, metrics, pretrain, torchrun, wait_until, workers
from tests.spawn import free_port, repository

SAMPLES = 12
"""In a global batch: 4, 2 and 3 processes divide it."""
SEQUENCE = 64
WORDS = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.vocab=256",
    f"model.sequence={SEQUENCE}",
    f"batch.global_size={SAMPLES}",
    "batch.micro_size=1",
    "data=indexed",
    "precision=fp64",
    "optimizer.lr=0.003",
    "lr_schedule=constant",
    "lr_schedule.warmup_steps=1",
    "validation.every=0",
    "checkpoint.every=5",
    "metrics.wandb=off",
    "metrics.tensorboard=false",
    "metrics.every=100000",
)
CONF = "last_call_timeout={},keep_alive_interval={},keep_alive_max_attempt=3"
"""The agents wait so many seconds for more of them, and hold one for dead that says nothing in three intervals."""


@dataclass(frozen=True)
class Phase:
    """Part of a run between two changes."""

    processes: int
    first_step: int
    """0: not yet known."""


def agent(
    log: Path, port: int, words: Sequence[str], is_host: bool, pace: float
) -> AbstractContextManager[ForkServerProcess]:
    """One of torchrun's agents with one process, as if it were a node; killed at the end."""
    options = ["--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    options += [
        f"--rdzv-endpoint=localhost:{port}",
        f"--rdzv-conf=is_host={int(is_host)},{CONF.format(round(6 * pace), round(pace))}",
    ]
    return torchrun(log, options, repository() / "pretrain.py", *words)


def phases(log: Path) -> list[Phase]:
    """What the first process said about the number of processes and where they went on."""
    text = log.read_text(encoding="utf-8")
    found = re.findall(r"= (\d+) devices?|continuing from .* \(step (\d+)\)", text)
    told: list[Phase] = []
    for processes, step in found:
        if processes:
            told.append(Phase(int(processes), 0 if told else 1))
        else:
            told[-1] = Phase(told[-1].processes, int(step) + 1)
    return told


def run(folder: Path, min_steps: int, pace: float = 1.0) -> list[Phase]:
    """The elastic run in `folder`/elastic, of at least so many steps with each number of processes, and the unbroken
    one, on one process, in `folder`/whole."""
    folder.mkdir(exist_ok=True)
    with IndexedWriter(folder / "corpus", 256) as writer:
        for path in sorted((repository() / "pangu").glob("*/*.py")):
            writer.add(list(path.read_bytes()))
    output, log = folder / "elastic", folder / "agent-0.log"
    words = (*WORDS, f"data.train=[{folder / 'corpus'}]")
    port = free_port()

    def made(processes: int) -> bool:
        """Whether that many processes have worked long enough."""
        now = phases(log)[-1:]
        figures = output / "metrics.jsonl"
        steps = len(figures.read_bytes().splitlines()) if figures.exists() else 0
        return bool(now) and now[0].processes == processes and steps >= now[0].first_step + min_steps > min_steps

    endless = (*words, "train.steps=1000000", f"train.output={output}")
    with ExitStack() as running:
        agents = [
            running.enter_context(agent(folder / f"agent-{n}.log", port, endless, n == 0, pace)) for n in range(4)
        ]
        wait_until(lambda: made(4))
        for lost in agents[2:]:
            kill_all(lost)
        wait_until(lambda: made(2))
        agents[2] = running.enter_context(agent(folder / "agent-4.log", port, endless, False, pace))
        wait_until(lambda: made(3))
        os.kill(workers(agents[0])[0], signal.SIGTERM)
        for each in agents[:3]:
            each.join(timeout=120)
            if each.exitcode != 0:
                raise RuntimeError(log.read_text(encoding="utf-8"))
    done = pretrain(folder / "whole", *words, f"train.steps={len(metrics(output))}")
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return phases(log)


def draw(folder: Path, told: list[Phase], picture: Path) -> None:
    """Both loss curves, with the number of processes."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, style in (
        ("whole", {"color": "0.75", "linewidth": 4}),
        ("elastic", {"color": "tab:blue", "linewidth": 1}),
    ):
        losses = [line["loss"] for line in metrics(folder / name)]
        label = "unbroken, 1 process" if name == "whole" else "processes killed and added"
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    for phase in told:
        axes.axvline(phase.first_step, color="0.6", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"{phase.processes} processes",
            (phase.first_step, 0.92),
            (4, 0),
            ("data", "axes fraction"),
            textcoords="offset points",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(loc="lower left")
    figure.savefig(picture)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        draw(Path(scratch), run(Path(scratch), 40), Path(sys.argv[1]))
