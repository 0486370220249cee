"""What the launcher passes on, and what it says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pangu.common.exit_status import INTERRUPTED, RETRYABLE, USER_ERROR
from pangu.training.interrupts import SAME_SECONDS
from scripts import launch
from tests.end_to_end.commands import is_running, kill_all, wait_until
from tests.spawn import repository

WORKER = "trap 'sleep 1; exit {status}' {name}; echo ready; while :; do sleep 0.1; done"


def obey_signals() -> None:
    """What a shell starts in the background ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def launched(processes: int, worker: str, launcher: Sequence[str] = ("scripts/launch.py",)) -> Iterator[Any]:
    """A launcher of bash that runs `worker`; it and its processes are killed at the end if they still run."""
    line = [sys.executable, *launcher, "--standalone", f"--nproc-per-node={processes}", "--no-python"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*line, "bash", "-c", worker], cwd=repository(), stdout=pipe, stderr=pipe, text=True, preexec_fn=obey_signals
    ) as process:
        try:
            yield process
        finally:
            kill_all(process)


@pytest.mark.parametrize(
    ("name", "status"), [("TERM", 0), ("INT", 3), ("HUP", 0), pytest.param("TERM", 3, marks=pytest.mark.long)]
)
def test_the_launcher_passes_signals_on_and_ends_with_the_status_of_its_processes(name: str, status: int) -> None:
    with launched(1, WORKER.format(name=name, status=status)) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.Signals[f"SIG{name}"])
        _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == status, said
    assert "SignalException" not in said


def test_a_second_ctrl_c_ends_what_does_not_listen() -> None:
    with launched(2, "trap 'echo heard' INT; echo $BASHPID; while :; do sleep 0.1; done") as launcher:
        workers = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "heard\n"
        time.sleep(SAME_SECONDS)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=300) == INTERRUPTED
        wait_until(lambda: not any(map(is_running, workers)))


PATIENT_LAUNCHER = """
import runpy
from pangu.training import interrupts
interrupts.SAME_SECONDS = 300.0  # however long the machine takes to send and hear them
runpy.run_path("scripts/launch.py", run_name="__main__")
"""


def test_ctrl_c_pressed_twice_at_once_is_one_for_the_launcher_too() -> None:
    worker = "trap 'trap : INT; echo heard; sleep 3; echo saved; exit 0' INT; echo ready; while :; do sleep 0.1; done"
    with launched(1, worker, ("-c", PATIENT_LAUNCHER)) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.readline() == "heard\n"
        launcher.send_signal(signal.SIGINT)
        said, _ = launcher.communicate(timeout=300)
    assert (launcher.returncode, said) == (0, "saved\n")


def test_a_users_error_is_the_one_message() -> None:
    worker = 'if [ $RANK = 0 ]; then echo "error: model.heads = 7" >&2; exit 2; fi; exec sleep 100'
    line = [sys.executable, "scripts/launch.py", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run([*line, "bash", "-c", worker], cwd=repository(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (USER_ERROR, "", "error: model.heads = 7\n")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--nproc-per-node=x", "--nproc-per-node=x --nnodes=1:1 (Unsupported nproc_per_node value: x): "),
        ("--nproc-per-node=0", "--nproc-per-node=0 --nnodes=1:1 (there is nothing to start): --nproc-per-node takes"),
        ("--nnodes=3:2", "--nproc-per-node=1 --nnodes=3:2 (min_nodes must be > 0 and <= max_nodes"),
        ("--nnodes=1:2:3", "--nproc-per-node=1 --nnodes=1:2:3 (nnodes=1:2:3 is not in"),
        ("--max-restarts=-1", "--nproc-per-node=1 --nnodes=1:1 (max_restarts must be >= 0)"),
    ],
)
def test_what_torchrun_cannot_start_is_one_message_with_its_cause(option: str, said: str) -> None:

    def refusal(*words: str) -> str:
        return launch.refusal(launch.LauncherParser().parse_args(words))

    assert refusal(option, "pretrain.py").startswith(f"torchrun cannot start {said}")
    assert refusal("tests").startswith("tests: no such program: use ")  # a folder
    assert refusal("pretrian.py").startswith("pretrian.py: no such program: use pretrain.py, or")
    for words in (["-m", "pangu.pretrain"], ["--no-python", "bash"]):
        assert not refusal(*words)
    assert not refusal("--standalone", "--nnodes=1:2", "--nproc-per-node=2", "pretrain.py")


@pytest.mark.parametrize(
    ("exitcode", "status", "line"),
    [
        (USER_ERROR, USER_ERROR, ""),
        (-2, INTERRUPTED, ""),
        (-9, 137, r"\nrank 3 on \S+ \(process 11\) was ended by SIGKILL, most likely because host memory .*: try .*\n"),
        (-11, 139, r"\nrank 3 on \S+ \(process 11\) was ended by SIGSEGV\n"),
        (1, 1, r"\nrank 3 on \S+ \(process 11\) exited with status 1; see its output above\n"),
    ],
)
def test_a_crash_is_one_line(exitcode: int, status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the process that failed first."""
    first, second = ProcessFailure(3, 11, exitcode, ""), ProcessFailure(4, 12, 77, "")
    first.timestamp = second.timestamp - 1
    assert launch.report(ChildFailedError("pretrain.py", {4: second, 3: first})) == status
    assert re.fullmatch(line, capsys.readouterr().err)


def test_an_address_that_cannot_be_is_one_message() -> None:
    line = [sys.executable, "scripts/launch.py", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:99999"]
    done = subprocess.run([*line, "pretrain.py"], cwd=repository(), capture_output=True, text=True, check=False)
    assert done.returncode == USER_ERROR
    assert done.stderr.startswith("launch.py: error: torchrun cannot start: The port number of the rendezvous endpoint")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_one_message_with_the_options_that_take_another() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        line = [sys.executable, "scripts/launch.py", f"--master-port={port}", "pretrain.py"]
        done = subprocess.run(line, cwd=repository(), capture_output=True, text=True, check=False)
    assert done.returncode == USER_ERROR
    said = (
        rf"launch\.py: error: port {port} of \S+ is in use: set another one with --master-port or --rdzv-endpoint.*\n"
    )
    assert re.fullmatch(said, done.stderr), done.stderr


def test_launchers_that_do_not_meet_say_so() -> None:
    """Nobody else can serve a port that is bound, and this test does not."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        options = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        line = [sys.executable, "scripts/launch.py", *options, "--rdzv-conf=timeout=1", "pretrain.py"]
        done = subprocess.run(line, cwd=repository(), capture_output=True, text=True, check=False)
    assert done.returncode == RETRYABLE
    assert (
        f"\nthe launchers of this run could not connect at 127.0.0.1:{port}: The client socket has timed out"
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_launcher_that_waits_for_that_of_node_0_ends_at_once_when_it_is_told_to() -> None:
    """It has no processes yet, and waits in torch."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = ["--master-addr=127.0.0.1", f"--master-port={silent.getsockname()[1]}"]
        line = [sys.executable, "scripts/launch.py", "--spares=0", "--nnodes=2", "--node-rank=1", *place, "pretrain.py"]
        with subprocess.Popen(line, cwd=repository()) as launcher:
            try:
                silent.accept()
                launcher.terminate()
                assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
            finally:
                launcher.kill()


def test_a_launcher_whose_store_is_cut_off_ends_soon_after_its_last_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes connections and never answers stands for a partition; torchrun waits for it for ever."""
    monkeypatch.setattr(launch, "STORE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert launch.answers("127.0.0.1", store.port)
        assert not launch.answers("127.0.0.1", silent.getsockname()[1])
    asked, running = [], iter([[], [7], [7], [], [], [], []])
    monkeypatch.setattr(launch, "children", lambda: next(running))
    monkeypatch.setattr(launch, "answers", lambda *place: bool(asked.append(place)))
    monkeypatch.setattr(launch, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: asked.append(status))
    launch.end_after_workers("node-a", 29400)
    assert asked == [("node-a", 29400)] * launch.SILENCES + [RETRYABLE]
