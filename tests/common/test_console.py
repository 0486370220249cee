"""Commands outlive the loss of their console."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pangu.common.exit_status import READER_GONE, USER_ERROR
from tests.end_to_end.commands import SMALL, call_and_exit, metrics
from tests.spawn import repository, run_ranks

FULL = (
    "pretrain.py: error: cannot write standard output: the disk is full: free some space or choose a folder on "
    "another disk\n"
)


@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [(">/dev/full", USER_ERROR, FULL), (">&-", 0, ""), ("2>&-", 0, "")],
)
def test_a_command_whose_output_is_lost_says_so_once(redirection: str, status: int, said: str) -> None:
    line = f"exec {sys.executable} pretrain.py --help model.window {redirection}"
    done = subprocess.run(line, shell=True, cwd=repository(), stderr=-1, stdout=-1, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "pretrain.py", "--help", "all"]
    done = subprocess.run(line, cwd=repository(), stdout=writer, stderr=-1, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def run_on(console: str, *words: str) -> None:
    """A run with a broken standard output and, where it is `neither`, standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    for number in (1, 2) if console == "neither" else (1,):
        os.dup2(os.open("/dev/full", os.O_WRONLY) if console == "full" else writer, number)
    call_and_exit("pretrain", *words)


@pytest.mark.parametrize("console", ["pipe", "full", "neither"])
def test_a_run_continues_without_its_console(console: str, tmp_path: Path) -> None:
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "train.steps=3", "metrics.every=1")
    done = run_ranks(1, run_on, console, *words, "checkpoint.every=0", f"train.output={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "summary.json").exists()
    assert done.stderr.count("standard output was closed") == (console != "neither")
