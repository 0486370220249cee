"""What the loop says of its steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pangu.training import loop
from tests.end_to_end.commands import metrics
from tests.training.test_resume import train


def test_the_time_of_a_step_reaches_from_one_end_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a device that still updates weights when a step's loss is known: that is time of the next step.
    What is done beside training is not."""

    def behind_the_step(device: object) -> float:
        time.sleep(0.2)
        return 0.0

    def beside_training(trainer: object) -> None:
        time.sleep(1.5)

    monkeypatch.setattr(loop, "peak_memory_gib", behind_the_step)
    monkeypatch.setattr(loop, "find_difference", beside_training)
    train(tmp_path, 3, "train.check_replicas=2", "checkpoint.every=0")
    times = [line["step_time_s"] for line in metrics(tmp_path)]
    assert times[1] >= 0.2
    assert 0.2 <= times[2] < 1.5
