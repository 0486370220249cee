"""A run saves and stops when it is asked to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pangu.training.run import run
from pangu.training.step import Trainer
from tests.configs import composed, config
from tests.end_to_end.commands import metrics
from tests.training.test_resume import QUIET, train

forward_backward = Trainer.forward_backward


def sends(number: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a signal arrive in the middle of a step."""

    def compute(trainer: Trainer, batches: Any) -> None:
        if trainer.step == step - 1:
            os.kill(os.getpid(), number)
        forward_backward(trainer, batches)

    monkeypatch.setattr(Trainer, "forward_backward", compute)


def test_sigterm_saves_and_stops_and_the_run_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = train(tmp_path / "whole", 5, "checkpoint.every=100")
    handler = signal.getsignal(signal.SIGTERM)
    sends(signal.SIGTERM, 2, monkeypatch)  # all hear of it while they make step 3
    assert train(tmp_path / "run", 5, "checkpoint.every=100") == unbroken[:3]
    said = capsys.readouterr().err
    assert "stopped after step 3 (SIGTERM)" in said
    assert "step-00000003 is written; the same command continues" in said
    assert signal.getsignal(signal.SIGTERM) is handler
    assert (tmp_path / "run" / "plots" / "loss.png").stat().st_size
    assert train(tmp_path / "run", 5, "checkpoint.every=100") == unbroken
    assert train(tmp_path / "unsaved", 5, "checkpoint.every=0") == unbroken[:3]
    said = capsys.readouterr().err
    assert "nothing is written (checkpoint.every = 0); the same command begins where this one did" in said


def test_sigusr1_saves_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sends(signal.SIGUSR1, 2, monkeypatch)
    assert len(train(tmp_path, 5, "checkpoint.every=100")) == 5
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000005"]


def test_a_time_limit_stops_the_run_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.steps=100000", "checkpoint.every=100000", "train.stop_after=3", "metrics.every=100000")
    assert run(composed(*QUIET, *words, "train.stop_status=143", f"train.output={tmp_path}")) == 143
    steps = len(metrics(tmp_path))
    assert 0 < steps < 100000
    assert f"stopped after step {steps} (train.stop_after)" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert (tmp_path / "plots" / "loss.png").stat().st_size


@pytest.mark.parametrize(("given", "seconds"), [("90", 90.0), ("1h30m", 5400.0), ("2m5s", 125.0), ("null", None)])
def test_times_are_read(given: str, seconds: float | None) -> None:
    assert config(f"train.stop_after={given}").train.stop_after_s == seconds
