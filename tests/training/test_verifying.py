"""Old checkpoints are read again while training goes on, and bit rot is named."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pangu.training import verifying
from pangu.training.step import Trainer
from pangu.training.verifying import Verifier
from tests.end_to_end.commands import metrics
from tests.training.test_resume import first_file, flip, train

HOUR = 3600.0
forward_backward = Trainer.forward_backward


def test_a_run_names_bit_rot_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verifying, "LOOK_SECONDS", 0.01)
    found = threading.Event()
    name = Verifier._name
    monkeypatch.setattr(Verifier, "_name", lambda *given: (name(*given), found.set()))

    def compute(trainer: Trainer, batches: Any) -> None:
        if trainer.step == 2:
            flip(first_file(tmp_path / "checkpoints/step-00000001"))
            assert found.wait(120)
        forward_backward(trainer, batches)

    losses = train(tmp_path, 4)
    shutil.rmtree(tmp_path)
    monkeypatch.setattr(Trainer, "forward_backward", compute)
    assert train(tmp_path, 4, "checkpoint.verify_every_hours=1e-9", "checkpoint.asynchronous=false") == losses
    assert "checkpoints/step-00000001: bit rot: tensors-00000-00000.safetensors differs" in capsys.readouterr().err
    assert [line.get("damaged_checkpoints") for line in metrics(tmp_path)][-1] == 1
    assert json.loads((tmp_path / "heartbeat.json").read_text())["damaged_checkpoints"] == 1
    for thread in threading.enumerate():
        if thread.name == "verify":
            thread.join(60)
            assert not thread.is_alive()  # it would read checkpoints for the rest of this process


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The checkpoints of a run, which are two hours old."""
    train(tmp_path, 2)
    for index in tmp_path.glob("checkpoints/*/index.json"):
        os.utime(index, (time.time() - 2 * HOUR,) * 2)
    return tmp_path / "checkpoints"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints that are read; nothing is before `look`."""
    names: list[str] = []
    damage = verifying._damage
    monkeypatch.setattr(verifying, "_damage", lambda path: (names.append(path.name), damage(path))[1])
    monkeypatch.setattr(verifying.Thread, "start", lambda thread: None)
    return names


def test_each_checkpoint_is_read_once_in_so_many_hours_also_over_restarts(run: Path, read: list[str]) -> None:
    Verifier(run, 2.5).verify_due()
    assert read == []
    for _ in range(2):  # another process
        Verifier(run, 1.5).verify_due()
        assert read == ["step-00000001", "step-00000002"]
    times = json.loads((run / verifying.FILE).read_text())
    (run / verifying.FILE).write_text(json.dumps(times | {"step-00000002": time.time() - 2 * HOUR}))
    Verifier(run, 1.5).verify_due()
    assert read[2:] == ["step-00000002"]
    (run / verifying.FILE).write_text("{")
    Verifier(run, 1.5).verify_due()
    assert len(read) == 5


def test_every_damage_is_named_until_it_is_repaired(
    run: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    verifier = Verifier(run, 1e-9)
    whole = first_file(run / "step-00000001")
    content = whole.read_bytes()
    for change, words in (
        (lambda: flip(whole), "differs from what was written"),
        (lambda: whole.write_bytes(content[:-1]), f"({len(content) - 1} of {len(content)} bytes"),
        (whole.unlink, "cannot be read (No such file"),
        (lambda: whole.symlink_to("/etc/hostname"), "is a symbolic link"),
        (lambda: (run / "step-00000001/index.json").unlink(), "index.json is missing"),
    ):
        caplog.clear()
        change()
        with caplog.at_level(logging.ERROR, "pangu"):
            verifier.verify_due()
        assert [*verifier.damaged] == ["step-00000001"]
        assert words in caplog.text
        if whole.is_symlink():
            whole.unlink()
            whole.write_bytes(content)
            verifier.verify_due()
            assert not verifier.damaged


def test_a_checkpoint_that_goes_meanwhile_is_not_damaged(
    run: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly = verifying._read_slowly

    def read_what_is_gone(file: Path) -> tuple[str, int]:
        shutil.rmtree(run / "step-00000001", ignore_errors=True)
        return slowly(file)

    monkeypatch.setattr(verifying, "_read_slowly", read_what_is_gone)
    verifier = Verifier(run, 1.0)
    verifier.verify_due()
    assert read == ["step-00000001", "step-00000002"]
    assert not verifier.damaged
