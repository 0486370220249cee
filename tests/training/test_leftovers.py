"""A run in a process that lives on, as in a notebook, leaves no thread, socket, process or memory behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from unittest.mock import patch

import pytest

from pangu.common.errors import UserError
from pangu.training.run import run
from pangu.training.step import Trainer
from tests.configs import composed
from tests.end_to_end.commands import wait_until
from tests.spawn import free_port, run_ranks
from tests.training.test_resume import QUIET

EVERYTHING = (
    *("train.steps=3", "checkpoint.every=1", "checkpoint.memory_every=1", "checkpoint.verify_every_hours=1e-9"),
    *("faults.verify_weights=true", "faults.straggler_every=1", "metrics.tensorboard=true"),
    "train.alert_command=[/bin/true]",
)


def held() -> Counter[str]:
    """What this process holds that ends with its uses."""
    gc.collect()
    found = [f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()]
    found += [f"process {child.name}" for child in active_children()]
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this very listing
            found.append(f"file {descriptor.readlink()}".partition(":")[0])
    found += ["thread" for _ in Path("/proc/self/task").iterdir()]
    return Counter(found)


def run_and_stay(folder: Path, ports: list[int], fails: bool) -> None:
    """Print what the second run leaves; the first one loads libraries, some of which keep threads of their own."""
    os.environ["PANGU_MEMORY"] = str(folder / "memory")
    address, update = int(os.environ["MASTER_PORT"]), Trainer.update

    def fail(trainer: Trainer, *arguments: object) -> object:
        if fails and trainer.step == 2:
            raise UserError("no more")
        return update(trainer, *arguments)

    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(address + number)
        before = held()
        words = (f"metrics.prometheus_port={port}", f"checkpoint.remote=file://{folder}/remote-{number}")
        with patch.object(Trainer, "update", fail), suppress(UserError):
            run(composed(*QUIET, *EVERYTHING, *words, f"train.output={folder}/{number}"))
    with suppress(TimeoutError):
        wait_until(lambda: not held() - before, 60)
    print(f"left behind: {dict(held() - before)}")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_leaves_nothing_behind(ranks: int, fails: bool, tmp_path: Path) -> None:
    done = run_ranks(ranks, run_and_stay, tmp_path, [free_port(), free_port()], fails)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left behind: {}\n") == ranks, done.stdout
    assert len((tmp_path / "0/metrics.jsonl").read_text().splitlines()) == 3 - fails
    assert fails or not list((tmp_path / "memory").iterdir()), "copies serve the next start of a run that has failed"
