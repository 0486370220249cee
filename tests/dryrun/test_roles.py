"""Processes that carry out ranks: what is said when they fail, and that they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.dryrun import roles, worker
from pangu.dryrun.roles import run_jobs
from pangu.dryrun.worker import ENVIRONMENT
from tests.dryrun import jobs
from tests.spawn import repository


@pytest.fixture(autouse=True)
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, which end with each test."""
    monkeypatch.setattr(roles, "_workers", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Have processes carry out a function in the place of ranks."""
    return lambda function: monkeypatch.setattr(worker, "answer", function)


def test_a_process_that_says_much_is_not_held_up(answer: Callable[..., None]) -> None:
    answer(jobs.say_much)
    assert list(run_jobs([({}, 0, {})])) == [{"peak": 7}]


def test_a_process_that_ends_has_the_last_word(answer: Callable[..., None]) -> None:
    answer(jobs.fail_at_once)
    for _ in range(2):
        with pytest.raises(UserError, match="the dry run of rank 3 failed: \ufffd no memory; only parallel=auto"):
            list(run_jobs([({}, 3, {})]))


def test_a_process_that_is_killed(answer: Callable[..., None]) -> None:
    answer(jobs.be_killed)
    with pytest.raises(UserError, match="the dry run of rank 0 failed: its process was killed"):
        list(run_jobs([({}, 0, {})]))


def test_a_process_sees_no_device_and_loads_no_plug_in_of_one(
    answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose own device would stand beside the fake one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    answer(jobs.tell_environment)
    assert list(run_jobs([({}, 0, {})])) == [ENVIRONMENT]
    assert ENVIRONMENT["CUDA_VISIBLE_DEVICES"] == ""


def test_one_failure_ends_all(answer: Callable[..., None]) -> None:
    """The other process would be busy for long."""
    answer(jobs.fail_or_sleep)
    began = time.monotonic()
    with pytest.raises(UserError, match="the dry run of rank 0 failed: no"):
        list(run_jobs([({"fails": 1}, 0, {}), ({}, 1, {}), ({}, 2, {})]))
    assert time.monotonic() - began < jobs.LONG


def test_what_is_done_is_told_before_the_rest_and_a_listener_may_leave(answer: Callable[..., None]) -> None:
    answer(jobs.answer_or_sleep)
    began, reports = time.monotonic(), run_jobs([({}, 0, {}), ({"long": 1}, 1, {})])
    assert next(reports)["peak"] == 7
    reports.close()  # type: ignore[attr-defined]  # a generator
    assert time.monotonic() - began < jobs.LONG


COMMAND = """
import os
from pangu.dryrun import worker
from pangu.dryrun.roles import run_jobs
from tests.dryrun import jobs

worker.answer = jobs.tell_and_sleep
list(run_jobs([({"file": os.environ["TOLD"]}, 0, {})]))
"""


def test_a_process_ends_when_nobody_is_there_to_ask_and_runs_no_script(tmp_path: Path) -> None:
    """Before it has answered. Without a guard the script would start processes that start processes."""
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(COMMAND, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(repository()), "TOLD": str(told)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    while not (told.exists() and told.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60.0
    while is_running(told.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: str) -> bool:
    """Whether a process is there and has not ended; nobody may have asked yet how it ended."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"
