"""Processes that carry out ranks: what they say when they fail, and that they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.dryrun.roles import Worker, run_jobs
from tests.spawn import repository


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Worker:
    """One that is a script of the shell, which answers at once."""
    be(monkeypatch, tmp_path, request.param)
    return Worker()


def be(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Workers are this script."""
    program = folder / "worker"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    "worker", ["read job; head -c 300000 /dev/zero >&2; echo '{\"peak\": 7}'; exec sleep 100"], indirect=True
)
def test_a_process_that_says_much_is_not_held_up(worker: Worker) -> None:
    assert worker.report({}, 0)["peak"] == 7
    worker.end()


@pytest.mark.parametrize("worker", ["printf 'warning\\n\\377 no memory\\n\\n' >&2; exit 3"], indirect=True)
def test_a_process_that_ends_has_the_last_word_each_time_it_is_asked(worker: Worker) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="the dry run of rank 3 failed: \ufffd no memory"):
            worker.report({}, 3)


@pytest.mark.parametrize(
    "worker", ['read job; echo "{\\"peak\\": $TORCH_DEVICE_BACKEND_AUTOLOAD}"; exec sleep 100'], indirect=True
)
def test_a_process_loads_no_plug_in_of_a_device(worker: Worker) -> None:
    """Whose own device would stand beside the fake one."""
    assert worker.report({}, 0)["peak"] == 0
    worker.end()


def test_a_process_cannot_open_a_real_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    be(monkeypatch, tmp_path, 'read job; echo "{\\"seen\\": \\"$CUDA_VISIBLE_DEVICES\\"}"; exec sleep 100')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    worker = Worker()
    assert worker.report({}, 0) == {"seen": ""}
    worker.end()


@pytest.mark.parametrize("worker", ["kill -9 $$"], indirect=True)
def test_a_process_that_is_killed(worker: Worker) -> None:
    with pytest.raises(UserError, match="its process exited with status -9"):
        worker.report({}, 0)


def test_one_failure_ends_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other worker would be busy for long."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    be(monkeypatch, tmp_path, 'read job; case "$job" in *fails*) echo \'{"error": "no"}\';; esac; exec sleep 600')
    began = time.monotonic()
    with pytest.raises(UserError, match="the dry run of rank 0 failed: no"):
        list(run_jobs([({"fails": 1}, 0), ({}, 1), ({}, 2)]))
    assert time.monotonic() - began < 600


def test_what_is_done_is_told_before_the_rest_and_a_listener_may_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be(
        monkeypatch,
        tmp_path,
        'while read job; do case "$job" in *long*) exec sleep 600;; esac; echo \'{"peak": 7}\'; done',
    )
    began, reports = time.monotonic(), run_jobs([({}, 0), ({"long": 1}, 1)])
    assert next(reports)["peak"] == 7
    reports.close()
    assert time.monotonic() - began < 600


def test_a_process_ends_when_nobody_is_there_to_ask() -> None:
    """Before it has answered."""
    command = [sys.executable, "-m", "pangu.dryrun"]
    job = json.dumps([{}, 0, {}])
    done = subprocess.run(command, input=f"{job}\n", capture_output=True, text=True, cwd=repository(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
