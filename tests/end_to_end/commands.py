"""Runs the project's commands as a user types them: in this process where the process is not the claim."""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from pangu.config.help import show_help
from pangu.pretrain import pretrain as pretraining
from tests.spawn import Program, fork_server, redirect, repository, run_ranks, use_one_core

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

SAME_ATTENTION = "model.attention=sdpa"
"""For runs that are compared bit for bit: each would choose by its own timing, and other kernels round otherwise."""
SAME_PRODUCTS = "precision.fp32_matmul=highest"
"""The same, in fp32."""
VARIABLES = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
"""Of this process, which others do not inherit."""
HANG = """
import signal, time


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun would wait 30 s for it to end
    time.sleep(900)
"""
"""For scripts of tests."""


def command(
    *words: str, processes: int = 0, cwd: Path | None = None, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, or `torchrun --nproc-per-node=PROCESSES WORDS`."""
    line = [sys.executable]
    if processes:
        line += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    folder = cwd or str(repository())
    return subprocess.run(
        [*line, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@contextmanager
def torchrun(log: Path, options: Sequence[str], script: Path, *words: str) -> Iterator[ForkServerProcess]:
    """`torchrun OPTIONS SCRIPT WORDS`, not waited for and killed at the end; what it and its workers say goes to `log`.

    The launcher is torch's own. It and its workers, also those that it starts after a failure, are forked from a
    process that has imported what they need.
    """
    line = ["--run-path", "--start-method=fork", *options, str(script), *words]
    log.touch()
    process = fork_server().Process(target=_torchrun, args=(sys.path, log, line))
    process.start()
    try:
        yield process
    finally:
        kill_all(process)


def _torchrun(path: list[str], log: Path, line: list[str]) -> None:
    sys.path[:] = path
    os.chdir(repository())
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    use_one_core()
    redirect(log, 1, 2)
    close = MultiprocessContext._close

    def let_go(context: MultiprocessContext, *arguments: Any, **keywords: Any) -> None:
        """A forked worker that returns waits until its launcher has read that, which one that ends it never does."""
        context._worker_finished_event.set()
        close(context, *arguments, **keywords)

    MultiprocessContext._close = let_go
    torch.distributed.run.main(line)


def wait_until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    """Look again and again. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def workers(process: subprocess.Popen[str] | ForkServerProcess) -> list[int]:
    """Process numbers of what a launcher has started."""
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in children.stdout.split()]


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(process: subprocess.Popen[str] | ForkServerProcess) -> None:
    """SIGKILL to a launcher, so that it restarts nothing, and to its workers; their locks are free then."""
    pids = workers(process)
    process.kill()
    for pid in pids:
        kill(pid)
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")


def call(name: str, words: list[str]) -> int | str | None:
    """`python NAME.py WORDS` in this process, NAME being for example `tools/plan`; its exit status."""
    with patch.object(sys, "argv", [f"{name}.py", *words]):
        try:
            if name != "pretrain":
                return importlib.import_module(name.replace("/", ".")).main(words)
            if not show_help(words, repository() / "configs"):
                pretraining(repository() / "configs")
        except SystemExit as end:
            return end.code
    return 0


def called(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The same, with what it says: what importing takes is spent once."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [str(word) for word in words]
    with redirect_stdout(out), redirect_stderr(err):
        status = call(name, arguments)
    return subprocess.CompletedProcess(arguments, status or 0, out.getvalue(), err.getvalue())


def call_and_exit(name: str, *words: str) -> None:
    """The same on a process of its own."""
    sys.exit(call(name, list(words)))


def run_script(path: str, *words: str) -> None:
    """`python PATH WORDS` on a process of its own."""
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def on_ranks(processes: int, name: str, *words: object, timeout: float = 300.0) -> Program:
    """The same on several processes, as torchrun would start them."""
    return run_ranks(processes, call_and_exit, name, *map(str, words), timeout=timeout)


def pretrain(
    output: Path, *overrides: str, processes: int = 0, timeout: float = 300.0
) -> subprocess.CompletedProcess[str] | Program:
    """`pretrain.py OVERRIDES train.output=OUTPUT`, in this process or on several others."""
    words = (*overrides, f"train.output={output}")
    return on_ranks(processes, "pretrain", *words, timeout=timeout) if processes else called("pretrain", *words)


def metrics(output: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, read strictly."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
