"""Processes end with the launcher that has started them."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.spawn import repository

WORKER = """
import os, time
from threading import Thread
from pangu.topology.launch import end_with_launcher
end_with_launcher()
Thread(target=time.sleep, args=(600,)).start()  # such a thread keeps a process that returns alive
print("ready", flush=True)
time.sleep(600)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_ends_when_its_launcher_is_killed() -> None:
    environment = {"PYTHONPATH": str(repository()), "TORCHELASTIC_RUN_ID": "none", "RANK": "3"}
    line = [sys.executable, "-c", LAUNCHER, WORKER]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environment, stdout=pipe, stderr=pipe, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        # until the worker, which has the same pipes, has ended
        _, said = launcher.communicate(timeout=300)
    assert f"rank 3 on {socket.gethostname()}: torchrun is gone (process {launcher.pid})" in said
