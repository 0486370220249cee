"""Leave and come back: runs that are told to stop, or killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from os import kill
from pathlib import Path

from tests.end_to_end.commands import SMALL, metrics, started

WORDS = (
    *SMALL,
    "data=synthetic",
    "model.vocab=64",
    "model.dropout=0.1",
    "validation.every=0",
    "lr_schedule.warmup_steps=1",
    "metrics.every=1000",
)


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Look again and again; fail after some time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_steps(output: Path) -> int:
    return len((output / "metrics.jsonl").read_bytes().splitlines()) if (output / "metrics.jsonl").exists() else 0


def first_process(output: Path) -> int:
    """Process number of rank 0, from the lock file."""
    return int((output / "run.lock").read_text().split()[-1])


def test_one_of_two_processes_is_told_to_save_and_then_to_stop(tmp_path: Path) -> None:
    with started(tmp_path, *WORDS, "train.steps=1000000", "checkpoint.every=1000000", processes=2) as run:
        wait_until(lambda: num_steps(tmp_path) > 2)
        kill(first_process(tmp_path), signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.glob("checkpoints/step-????????"))) == 1)
        before = num_steps(tmp_path)
        wait_until(lambda: num_steps(tmp_path) > before)
        kill(first_process(tmp_path), signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 0
    last = metrics(tmp_path)[-1]["step"]
    assert f"stopped after step {last} (SIGTERM)" in said
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / "index.json").is_file()
