"""Checkpoints are written while training goes on, and hold the state of their step."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint import files, writing
from pangu.checkpoint.files import list_checkpoints
from pangu.common.errors import UserError
from pangu.data.order import ORDER_VERSION
from pangu.metrics import writers
from pangu.training import loop, process
from pangu.training.resuming import _compare_order
from pangu.training.step import Trainer
from tests.configs import config
from tests.end_to_end.commands import metrics
from tests.training.test_faults import ROLLBACK, poisoned
from tests.training.test_resume import train

write_file = files._write_file


def checksums(output: Path, step: int) -> Any:
    """Of what the checkpoint of a step holds."""
    return json.loads((output / f"checkpoints/step-{step:08d}/index.json").read_text())["files"]


def test_training_goes_on_during_a_save_and_does_not_change_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = train(tmp_path / "waits", 4, "checkpoint.asynchronous=false")
    output = tmp_path / "goes_on"

    def slow(folder: Path, *arguments: Any) -> None:
        """Writes the checkpoint of step 2 only when step 3 is made."""
        deadline = time.monotonic() + 300
        while "00000002" in folder.name and len(metrics(output)) < 3:
            assert time.monotonic() < deadline, "training waits for the writer"
            time.sleep(0.01)
        write_file(folder, *arguments)

    monkeypatch.setattr(files, "_write_file", slow)
    assert train(output, 4) == losses
    for step in (1, 2, 3, 4):
        assert checksums(output, step) == checksums(tmp_path / "waits", step)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_failed_save_is_told_and_the_next_one_tries_again(
    asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ["step-00000002"]

    def write(folder: Path, *arguments: Any) -> None:
        if any(step in folder.name for step in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(folder, *arguments)

    monkeypatch.setattr(files, "_write_file", write)
    losses = train(tmp_path, 3, f"checkpoint.asynchronous={asynchronous}")
    assert "step-00000002: the checkpoint could not be written" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000003"]
    full.append("step-00000004")
    with pytest.raises(UserError, match=r"step-00000004: the checkpoint could not be written .*No space left"):
        train(tmp_path, 4, f"checkpoint.asynchronous={asynchronous}")
    full.clear()
    assert train(tmp_path, 4)[:3] == losses


def test_what_cannot_be_deleted_stays_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others would wait for the first process, whose writer had ended with an OSError."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "_delete", refuse)
    train(tmp_path, 3, "checkpoint.keep=1", "faults.proven_after=1")
    assert "step-00000001: cannot be deleted (" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000001",
        "step-00000002",  # the last one that is proven
        "step-00000003",
    ]


def test_a_run_whose_replicas_differ_ends_before_it_saves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every second step, as asked for."""
    monkeypatch.setattr(loop, "find_replica_difference", lambda trainer: f"weight/{trainer.step}")
    with pytest.raises(UserError, match="after step 2 replicas differ: weight/2; check"):
        train(tmp_path, 4, "train.check_replicas=2")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_failed_save_is_told_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only before the next save, which may be hours later: the step that ends next raises a flag, and the one after
    it has heard of that."""
    told: dict[int, bool] = {}
    forward_backward = Trainer.forward_backward

    def write(folder: Path, *arguments: Any) -> None:
        if "step-00000003" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(folder, *arguments)

    def compute(trainer: Trainer, batches: Any) -> None:
        while any(thread.name == "checkpoint" for thread in threading.enumerate()):
            time.sleep(0.01)
        told[trainer.step + 1] = "the checkpoint could not be written" in capsys.readouterr().err
        forward_backward(trainer, batches)

    monkeypatch.setattr(files, "_write_file", write)
    monkeypatch.setattr(Trainer, "forward_backward", compute)
    train(tmp_path, 7, "checkpoint.every=3", "checkpoint.asynchronous=true")
    assert told == {step: step == 6 for step in range(1, 8)}


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_saves_that_fail_again_and_again_end_the_run(
    asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that works in between starts the count again; metrics and heartbeat tell it."""
    failing = {2, 3, 5, 6, 7, 8, 9}

    def write(folder: Path, *arguments: Any) -> None:
        if int(folder.name[6:14]) in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(folder, *arguments)

    monkeypatch.setattr(files, "_write_file", write)
    words = (f"checkpoint.asynchronous={asynchronous}", "checkpoint.max_failed_saves=2")
    with pytest.raises(UserError, match=r"failed saves in a row: 3 \(checkpoint.max_failed_saves = 2\); the last o"):
        train(tmp_path, 20, *words)
    figures = [line.get("failed_saves") for line in metrics(tmp_path)]
    assert figures == [None, None, None, 1, 2, None, 1, 2]
    assert json.loads((tmp_path / "heartbeat.json").read_text())["failed_saves"] == 2
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001", "step-00000004"]


def test_figures_that_cannot_be_written_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of metrics.jsonl, heartbeats: one warning for each until they can be written again."""
    write, write_atomically = writers.JsonLinesWriter.write, process.write_atomically

    def write_line(self: writers.JsonLinesWriter, record: Any) -> None:
        if record.step in (2, 3, 5):
            raise UserError("metrics.jsonl: No space left on device")
        write(self, record)

    def write_beat(path: Path, content: bytes, **options: Any) -> None:
        if path.name == "heartbeat.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, content, **options)

    monkeypatch.setattr(writers.JsonLinesWriter, "write", write_line)
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(process, "write_atomically", write_beat)
    train(tmp_path, 6, "checkpoint.every=2")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 4, 6]
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl: No space left on device; the run continues") == 2
    assert said.count("/heartbeat.json: the disk is full") == 1


def test_the_figures_of_a_checkpoint_are_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what is written and not synced: a run that continues would lack lines of steps before it."""
    synced: dict[int, int] = {}
    fsync, commit = os.fsync, writing.commit

    def noted(handle: int) -> None:
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checked(path: Path, *arguments: Any) -> None:
        figures = tmp_path / "metrics.jsonl"
        on_disk = figures.read_bytes()[: synced.get(figures.stat().st_ino, 0)]
        assert f'"step": {int(path.name[5:])}' in on_disk.decode()
        assert tmp_path.stat().st_ino in synced, "the name of the file is not on the disk"
        commit(path, *arguments)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(writing, "commit", checked)
    assert len(train(tmp_path, 2)) == 2


def test_a_blend_that_is_continued_in_another_order_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints from before the order had a version number hold none."""
    blend, single = config("data=indexed", "data.train=[a,b]").data, config("data=indexed", "data.train=[a]").data
    _compare_order(Path("old"), {"samples": 12}, single)
    _compare_order(Path("new"), {"samples": 12, "order": ORDER_VERSION}, blend)
    assert not caplog.messages
    _compare_order(Path("old"), {"samples": 12}, blend)
    assert "old: written when datasets were blended by another rule; each continues from its share of sample 12" in (
        caplog.text
    )


@pytest.mark.parametrize("action", ["rollback", "stop"])
def test_a_standing_that_cannot_be_written_hides_no_fault(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, status: Any) -> None:
        raise UserError(f"{path}: the disk is full")

    monkeypatch.setattr("pangu.training.checkpoint_statuses.write_status", write)
    poisoned([9], monkeypatch)
    with pytest.raises(UserError, match="step-00000002: the disk is full"):
        train(tmp_path, 4, *ROLLBACK, f"faults.action={action}")
    assert "step 3: the loss is nan" in capsys.readouterr().err
