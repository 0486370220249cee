"""Leave and come back: runs that are told to stop, or killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import AbstractContextManager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import (
    SAME_ATTENTION,
    SAME_PRODUCTS,
    SMALL,
    kill,
    kill_all,
    metrics,
    pretrain,
    torchrun,
    wait_until,
    workers,
)
from tests.spawn import repository

WORDS = (
    *SMALL,
    SAME_ATTENTION,
    SAME_PRODUCTS,
    "data=synthetic",
    "model.vocab=64",
    "model.dropout=0.1",
    "validation.every=0",
    "lr_schedule.warmup_steps=1",
    "metrics.every=1000",
)


def num_steps(output: Path) -> int:
    return len((output / "metrics.jsonl").read_bytes().splitlines()) if (output / "metrics.jsonl").exists() else 0


def launched(output: Path, restarts: int, *words: str) -> AbstractContextManager[ForkServerProcess]:
    """A run on two processes, which torchrun starts again that often."""
    options = ("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}")
    script = repository() / "pretrain.py"
    return torchrun(output.with_suffix(".err"), options, script, *words, f"train.output={output}")


def first_process(output: Path) -> int:
    """Process number of rank 0, from the lock file."""
    return int((output / "run.lock").read_text().split()[-1])


def test_one_of_two_processes_is_told_to_save_and_then_to_stop(tmp_path: Path) -> None:
    output, tell = tmp_path / "run", tmp_path / "tell"
    tell.write_text('#!/bin/sh\ncat >> "$1"\n')
    tell.chmod(0o755)
    words = (*WORDS, "checkpoint.every=1000000", f"train.alert_command=[{tell},{tmp_path}/told]")
    with launched(output, 0, *words, "train.steps=1000000") as run:
        wait_until(lambda: num_steps(output) > 2)
        os.kill(first_process(output), signal.SIGUSR1)
        wait_until(lambda: len(list(output.glob("checkpoints/step-????????"))) == 1)
        before = num_steps(output)
        wait_until(lambda: num_steps(output) > before)
        os.kill(first_process(output), signal.SIGTERM)
        run.join(timeout=300)
        assert run.exitcode == 0
    said = output.with_suffix(".err").read_text()
    last = metrics(output)[-1]["step"]
    assert f"stopped after step {last} (SIGTERM)" in said
    assert [json.loads(line)["event"] for line in (tmp_path / "told").read_text().splitlines()] == ["stopped"]
    assert (output / "checkpoints" / f"step-{last:08d}" / "index.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(name, marks=pytest.mark.long) for name in ("adam", "lamb"))]
)
def test_runs_that_are_killed_come_back(optimizer: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGKILL of one rank, after which torchrun starts both again by itself, or of everything, after which the same
    command is given again; at random moments, most of them during a save. `--all --kills=50` is the long form, with
    every optimizer; the short one has Muon, whose matrices come together from both processes.

    The losses of the whole run are those of the unbroken one bit for bit, and no sample is lost or seen twice.
    """
    kills = request.config.getoption("--kills")
    words = (*WORDS, f"optimizer={optimizer}", "parallel.zero=1", "lr_schedule=constant", "checkpoint.every=2")
    output = tmp_path / "run"
    chance = random.Random(0)
    done = 0
    while done < kills:
        with launched(output, kills, *words, "train.steps=1000000") as run:
            for everything in [False] * chance.randint(0, 2) + [True]:
                target = newest(output) + chance.randint(1, 25)
                wait_until(lambda target=target: run.exitcode is not None or is_at(run, output, target))
                time.sleep(0.05 * chance.random())
                assert run.exitcode is None, output.with_suffix(".err").read_text()
                if everything:
                    kill_all(run)
                else:
                    victims = workers(run)
                    kill(chance.choice(victims))
                    wait_until(lambda victims=victims: not set(victims) & set(workers(run)))
                done += 1
    steps = newest(output) + 10
    for folder in (output, tmp_path / "whole"):
        finished = pretrain(folder, *words, f"train.steps={steps}", processes=2, timeout=300 + 60 * kills)
        assert finished.returncode == 0, finished.stderr
    assert figures(output) == figures(tmp_path / "whole")
    assert len(figures(output)) == steps
    index = json.loads((output / "checkpoints" / f"step-{steps:08d}" / "index.json").read_text())
    assert index["samples"] == 4 * steps


@pytest.mark.slow
def test_runs_that_are_killed_during_uploads_come_back_on_another_machine(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGKILL of everything while a checkpoint is sent, at moments drawn among its files; the next process has an empty
    run folder, or the one of the process before. The losses are those of the unbroken run, bit for bit."""
    kills, chance, cut = request.config.getoption("--kills"), random.Random(0), 0
    words = (*WORDS, "parallel.zero=1", "lr_schedule=constant", "checkpoint.every=2", "checkpoint.keep=3")
    remote = tmp_path / "remote"
    copied = f"checkpoint.remote=file://{remote}"
    output = tmp_path / "machine-0"
    for number in range(kills):
        with launched(output, 0, *words, copied, "train.steps=1000000") as run:
            target, files = newest_copy(remote) + 2 * chance.randint(1, 6), chance.randint(0, 3)
            deadline = time.monotonic() + 300
            while not is_sending(remote, target, files):
                assert run.exitcode is None, output.with_suffix(".err").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            kill_all(run)
        cut += any(not (path / "index.json").exists() for path in remote.glob("checkpoints/step-*"))
        if chance.random() < 0.7:
            output = tmp_path / f"machine-{number + 1}"
    assert cut, "no upload was cut short"
    steps = newest_copy(remote) + 6
    for folder, more in ((output, (copied,)), (tmp_path / "whole", ())):
        finished = pretrain(folder, *words, *more, f"train.steps={steps}", processes=2)
        assert finished.returncode == 0, finished.stderr
    assert figures(output) == figures(tmp_path / "whole")
    assert len(figures(output)) == steps
    last = max(path for path in remote.glob("checkpoints/step-*") if (path / "index.json").exists())
    assert int(last.name[5:13]) == steps


def newest_copy(remote: Path) -> int:
    """Step of the newest checkpoint there, whole or not."""
    return max((int(path.name[5:13]) for path in remote.glob("checkpoints/step-*")), default=0)


def is_sending(remote: Path, step: int, files: int) -> bool:
    """Whether a checkpoint of this step or a later one is being sent, and so many of its files have begun."""
    for path in remote.glob("checkpoints/step-*"):
        with suppress(FileNotFoundError):  # it is too old, and is being deleted
            names = [file.name for file in path.iterdir()]
            if int(path.name[5:13]) >= step and len(names) >= files and "index.json" not in names:
                return True
    return False


def is_at(run: ForkServerProcess, output: Path, step: int) -> bool:
    """Whether both processes are there (those of a restart may not be yet) and a step has been made, by them or, if no
    checkpoint had it, by the killed ones before them."""
    return num_steps(output) >= step and len(workers(run)) == 2


def newest(output: Path) -> int:
    """Step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in output.glob("checkpoints/step-????????")), default=0)


def figures(output: Path) -> list[tuple[Any, ...]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m["tokens"]) for m in metrics(output)]
