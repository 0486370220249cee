"""run.lock says who holds a run folder, whatever it said before."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.topology.launch import MEMBER
from pangu.training.process import only_run


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"host, process 3\n\x1b[31m", b"x" * 10_000_000])
def test_odd_bytes_are_read_and_replaced(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    with caplog.at_level(logging.INFO, "pangu"), only_run(tmp_path):
        assert (tmp_path / "run.lock").read_text().endswith(f", process {os.getpid()}")
    assert (tmp_path / "run.lock").read_bytes() == b""
    assert "was killed" in caplog.text
    assert len(caplog.text) < 1000


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"run\.lock: is a symbolic link"), only_run(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_another_run_is_named(tmp_path: Path) -> None:
    """The lock is the system's: another process holds it."""
    with held(tmp_path / "run.lock"), pytest.raises(UserError, match="another run uses"), only_run(tmp_path):
        pass


def test_a_process_that_the_launchers_have_given_up_loses_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.lock"
    monkeypatch.setenv(MEMBER, "3@node0:29400")
    with held(path, b"host, launcher a1, process 7"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b2")
        with pytest.raises(UserError, match="another run uses"), only_run(tmp_path):
            pass
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a1")
        with only_run(tmp_path):
            assert path.read_text().endswith(f", launcher a1, process {os.getpid()}")
    assert path.read_bytes() == b""


@contextmanager
def held(path: Path, content: bytes = b"host\xff") -> Iterator[None]:
    """Let another process hold the lock."""
    path.write_bytes(content)
    program = (
        f"import fcntl, time; f = open({str(path)!r}, 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"
    )
    other = subprocess.Popen(["python3", "-c", f"{program}; time.sleep(600)"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        yield
    finally:
        other.kill()
        other.communicate()
