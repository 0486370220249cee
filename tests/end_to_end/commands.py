"""Runs the project's commands as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.spawn import repository

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.sequence=32",
    "batch.global_size=4",
    "batch.micro_size=2",
    "metrics.wandb=off",
    "metrics.tensorboard=false",
)


def _words(words: tuple[str, ...], processes: int, restarts: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `python WORDS`, or of torchrun."""
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        start += [f"--max-restarts={restarts}"]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return [*start, *words], environment


def command(
    *words: str, processes: int = 0, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, or `torchrun --nproc-per-node=PROCESSES WORDS`."""
    line, environment = _words(words, processes, 0)
    folder = cwd or str(repository())
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def started(output: Path, *overrides: str, processes: int = 0, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """`pretrain`, not waited for, in a session of its own, all of which is killed at the end; stderr goes to a pipe."""
    words = (str(repository() / "pretrain.py"), *overrides, f"train.output={output}")
    line, environment = _words(words, processes, restarts)
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=repository(), env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL to all processes of a started command: the launcher's, and each worker's, which lead groups of theirs."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout
    for pid in listed.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def pretrain(output: Path, *overrides: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    """`pretrain.py OVERRIDES train.output=OUTPUT`."""
    script = str(repository() / "pretrain.py")
    return command(script, *overrides, f"train.output={output}", processes=processes)


def metrics(output: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, read strictly."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
