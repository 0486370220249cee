"""The progress bar."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pangu.metrics.progress import ProgressBar
from pangu.metrics.record import StepRecord
from pangu.metrics.writers import ConsoleWriter


@pytest.mark.parametrize("show", [True, False])
def test_progress_bar(capfd: pytest.CaptureFixture[str], show: bool) -> None:
    with ProgressBar(show) as progress:
        assert list(progress.track([1, 2], description="Counting")) == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Counting" in err) == show


def test_a_terminal_gets_colour_and_a_bar_and_a_file_plain_lines(
    tmp_path: Path, record: Callable[..., StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, (tmp_path / "log").open("w") as log:
        for stream in (terminal, log):
            with redirect_stdout(stream), redirect_stderr(stream):
                with ProgressBar(True) as progress:
                    assert list(progress.track([1, 2], description="Counting")) == [1, 2]
                    progress.advance(progress.add_task("Reading", total=None), 5)
                    progress.add_task("Waiting", total=None)
                ConsoleWriter(every=1, total_steps=1).write(record())
    shown = b""
    while b"loss 5.1235" not in shown:
        shown += os.read(ours, 65536)  # an error where the terminal has been closed and is empty
    os.close(ours)
    assert b"\x1b[1mloss 5.1235" in shown
    assert b"\x1b[?25l" in shown  # no cursor while the bar moves
    assert b"\x1b[38;5;" in shown.split(b"Counting")[1]
    plain = (tmp_path / "log").read_text()
    assert [line.split()[0] for line in plain.splitlines()] == ["Counting", "Reading", "step"]
    assert "2/2" in plain
    assert "5/5" in plain
    assert plain.isascii()
    assert not {"\x1b", "\r"} & set(plain)
