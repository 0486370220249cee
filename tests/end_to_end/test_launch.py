"""SIGTERM to the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.spawn import repository

WORKER = "trap 'sleep 1; exit {status}' TERM; echo ready; while :; do sleep 0.1; done"


@pytest.mark.parametrize("status", [0, pytest.param(3, marks=pytest.mark.long)])
def test_the_launcher_passes_sigterm_on_and_ends_with_the_status_of_its_processes(status: int) -> None:
    line = [sys.executable, "scripts/launch.py", "--standalone", "--nproc-per-node=1", "--no-python"]
    line += ["bash", "-c", WORKER.format(status=status)]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, cwd=repository(), stdout=pipe, stderr=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=60)
    assert (launcher.returncode == 0) == (status == 0), said
    assert "SignalException" not in said
