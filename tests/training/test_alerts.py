"""What somebody should see now starts a command, which training does not wait for."""

from __future__ import annotations

import errno
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint import files
from pangu.common.errors import UserError
from pangu.training import alerts
from pangu.training.alerts import Alerts
from tests.end_to_end.commands import is_running, wait_until
from tests.pace import at_some_pace
from tests.spawn import repository
from tests.training.test_faults import ROLLBACK, poisoned
from tests.training.test_resume import train

log = logging.getLogger("pangu")
write_file = files._write_file


def command(folder: Path, body: str) -> Path:
    """A program in a folder."""
    path = folder / "alert"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def keeps(tmp_path: Path) -> Path:
    """A program that adds its standard input to the file that it is told."""
    return command(tmp_path, 'cat >> "$1"')


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_tells_of_failures_and_of_its_end(keeps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, *arguments: Any) -> None:
        if "step-00000002" in folder.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(folder, *arguments)

    monkeypatch.setattr(files, "_write_file", write)
    poisoned([21], monkeypatch)
    word = f"train.alert_command=[{keeps},'{tmp_path}/$(echo told)']"
    train(tmp_path / "run", 8, *ROLLBACK, word)
    events = told(tmp_path / "$(echo told)")  # no shell has read it
    assert [event["event"] for event in events] == ["failed_save", "rollback", "ended"]
    assert "step-00000002: the checkpoint could not be written" in events[0]["message"]
    assert events[1]["message"].startswith("step 6: the loss is nan (faults.spike): rolling back; ")
    assert {event["run"] for event in events} == {str(tmp_path / "run")}
    poisoned([0], monkeypatch)
    with pytest.raises(UserError):
        train(tmp_path / "stops", 2, "faults.spike=1e9", word)
    assert [event["event"] for event in told(tmp_path / "$(echo told)")[3:]] == ["failed"]
    assert "step 1: the loss is nan" in told(tmp_path / "$(echo told)")[3]["message"]


@at_some_pace
def test_a_command_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pace: float
) -> None:
    limit_s, child = 0.5 * pace, tmp_path / f"child-{pace:g}"
    caplog.clear()
    monkeypatch.setattr(alerts, "LIMIT_SECONDS", limit_s)
    hangs = command(tmp_path, 'sleep 1000 & echo $! > "$1"; wait')
    with caplog.at_level(logging.WARNING, "pangu"), Alerts([str(hangs), str(child)], tmp_path):
        began = time.monotonic()
        log.warning("x", extra={"alert": "rollback"})
        assert time.monotonic() - began < 0.8 * limit_s, "training waits"
        wait_until(lambda: "killed after" in caplog.text)
    assert f"train.alert_command: killed after {limit_s:g} s, for the alert 'rollback'" in caplog.text
    wait_until(lambda: not is_running(int(child.read_text())))


def test_repeated_events_are_counted(keeps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Alerts([str(keeps), str(tmp_path / "told")], tmp_path):
        for number in range(5):
            log.warning("step %d", number, extra={"alert": "skipped_step"})
        log.warning("nobody needs to see this now")
        monkeypatch.setattr(alerts, "REPEAT_SECONDS", 0.0)
        log.warning("step 5", extra={"alert": "skipped_step"})
    events = [(event["event"], event["message"], event["left_out"]) for event in told(tmp_path / "told")]
    assert events[:2] == [("skipped_step", "step 0", 0), ("skipped_step", "step 5", 4)]
    assert [event[0] for event in events[2:]] == ["ended"]


def test_a_command_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pangu"), Alerts([str(command(tmp_path, "exit 3"))], tmp_path):
        pass
    assert "train.alert_command: exited with status 3, for the alert 'ended'" in caplog.text


def test_a_program_that_is_missing_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.alert_command: no-such-program: is not a program that this machine"):
        train(tmp_path, 1, "train.alert_command=[no-such-program]")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_page_lists_the_events_that_the_code_has() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (repository() / "pangu").rglob("*.py")]
    marked = {kind for text in sources for kind in re.findall(r'"alert": "(\w+)"', text)}
    assert "skipped_step" in "".join(sources)
    for page in "faults.md", "faults.zh.md":
        lines = (repository() / "docs" / page).read_text(encoding="utf-8").splitlines()
        rows = {name for line in lines if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
        assert marked | {"skipped_step", "ended", "failed"} <= rows
