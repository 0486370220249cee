"""What the script for Slurm does, with commands in place of Slurm's and of Python that note how they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.commands import wait_until
from tests.end_to_end.test_pages import understood
from tests.spawn import repository

SCRIPT = "scripts/slurm/pretrain.sbatch"
LAYOUTS = "scripts/slurm/layouts.txt"
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 SLURMD_NODENAME=a exec "$@"',
    "scancel": 'echo "$@" >> scancel; kill -TERM "$(cat step)"',
    "scontrol": 'echo "$@" >> scontrol',
    "python": 'trap "exit $STATUS" TERM; printf "%s\\n" "$@" > words; echo $$ > new; mv new step; '
    "[[ $STATUS != 2 ]] || exit 2; while :; do sleep 0.05; done",
}


@contextmanager
def job(folder: Path, *words: str, **variables: object) -> Iterator[subprocess.Popen[str]]:
    """Job 7 of four cores and one node, started in `folder`."""
    for name, line in COMMANDS.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
    slurm = {"JOB_ID": 7, "CPUS_ON_NODE": 4, "NNODES": 1, **variables}
    environment = os.environ | {f"SLURM_{name}": str(value) for name, value in slurm.items() if name.isupper()}
    environment |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "STATUS": str(variables.get("status", 0))}
    environment["OVERRIDES"] = str(repository() / LAYOUTS)
    line = ["bash", str(repository() / SCRIPT), *words]
    with subprocess.Popen(line, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def started(folder: Path) -> int:
    """Process number of the step, once it can be told to stop."""
    wait_until((folder / "step").exists)
    return int((folder / "step").read_text())


@pytest.mark.parametrize(("status", "requeued"), [(0, ["requeue 7"]), (1, [])])
def test_before_its_limit_a_job_saves_and_is_queued_again(status: int, requeued: list[str], tmp_path: Path) -> None:
    """Not if the run failed."""
    with job(tmp_path, "+config=quickstart", status=status) as shell:
        started(tmp_path)
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(300) == status
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 7\n"
    asked = (tmp_path / "scontrol").read_text().splitlines() if (tmp_path / "scontrol").exists() else []
    assert asked == requeued


def test_where_slurm_itself_queues_it_again_the_job_waits_for_its_run(tmp_path: Path) -> None:
    with job(tmp_path, "+config=quickstart") as shell:
        step = started(tmp_path)
        shell.terminate()
        time.sleep(0.3)
        assert shell.poll() is None
        os.kill(step, signal.SIGTERM)
        assert shell.wait(300) == 0
    assert not (tmp_path / "scontrol").exists()


def test_a_run_that_fails_is_a_job_that_fails(tmp_path: Path) -> None:
    with job(tmp_path, "model.heads=7", status=2) as shell:
        assert shell.wait(300) == 2
    assert not (tmp_path / "scontrol").exists()


def test_tasks_of_an_array_run_the_lines_of_a_file(tmp_path: Path) -> None:
    lines = (repository() / LAYOUTS).read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "pretrain.py").touch()
        words = ("+config=pangu_2_6b", "data.train=[a b]")
        with job(folder, *words, ARRAY_TASK_ID=number, GPUS_ON_NODE=8, status=2) as shell:
            shell.wait(300)
        command = (folder / "words").read_text().splitlines()
        assert command[command.index("pretrain.py") + 1 :] == [*words, *line.split()]
        understood(["python", *command])
    with job(tmp_path, ARRAY_TASK_ID=len(lines) + 1) as shell:
        _, said = shell.communicate(timeout=300)
        assert shell.returncode == 2
    assert said == f"pretrain.sbatch: error: {repository() / LAYOUTS} has no line {len(lines) + 1} (--array)\n"


@pytest.mark.skipif(sys.platform != "linux", reason="bash of other systems may be too old")
def test_the_words_of_the_launcher(tmp_path: Path) -> None:
    with job(tmp_path, "+config=quickstart", GPUS_ON_NODE=8, RESTART_COUNT=2, status=2) as shell:
        shell.wait(300)
    words = (tmp_path / "words").read_text().splitlines()
    assert {"--nnodes=1", "--node-rank=0", "--nproc-per-node=8", "--master-port=20007"} < set(words)
    assert "--log-dir=logs/slurm-7/start-2/a" in words
    outside_a_checkout = ["-m", "pangu", "launch"], ["train", "+config=quickstart"]
    assert (words[:3], words[-2:]) == outside_a_checkout
