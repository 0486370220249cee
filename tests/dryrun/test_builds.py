"""The dry run counts the same in every build of torch, and Inductor generates no more kernels.

PANGU_TORCH_BUILDS names scripts, separated by colons, each of which activates an environment with another build for the
Python of this process: torch's CUDA build without a GPU, with one, another version. `.ci/run` makes one.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pangu.dryrun.roles import Job
from pangu.dryrun.worker import ENVIRONMENT
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import LAYOUTS, values
from tests.dryrun.test_budgets import excess
from tests.spawn import repository

BUILDS = [script for script in os.environ.get("PANGU_TORCH_BUILDS", "").split(os.pathsep) if script]
GROUPED_QUERIES = (
    "parallel.context=2 batch.global_size=2 precision=bf16 model.positions=rope model.kv_heads=2 model.norm=rmsnorm "
    "model.activation=swiglu"
)
SERVE = """
import json
import sys
from multiprocessing import Pipe

sys.path.append(sys.argv.pop())
from pangu.dryrun.worker import answer, start

alive, own = Pipe(duplex=False)
out, jobs = open(sys.argv.pop(), "w"), sys.stdin
start(alive, "/dev/null")
json.dump([answer(*json.loads(job)) for job in jobs], out)
"""
"""Everything but torch comes from the environment of this process."""


def reports_in(script: str, folder: Path, jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Reports of a process that `script` has given another torch."""
    own, found = sysconfig.get_path("purelib"), folder / "found.json"
    command = f". {shlex.quote(script)}; exec {shlex.join(['python', '-c', SERVE, str(found), own])}"
    lines = "".join(f"{json.dumps(job)}\n" for job in jobs)
    path = os.pathsep.join(place for place in sys.path if place and place != own)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    subprocess.run(["bash", "-c", command], input=lines, text=True, env=environment, check=True)
    return json.loads(found.read_text(encoding="utf-8"))


def differences(one: Any, other: Any, path: str = "") -> dict[str, Any]:
    """Values that differ by their place in nested reports."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        parts = (differences(one.get(key), other.get(key), f"{path}/{key}") for key in keys)
        return {place: pair for part in parts for place, pair in part.items()}
    return {} if one == other else {path: (one, other)}


@pytest.mark.parametrize("script", BUILDS)
def test_a_dry_run_counts_the_same_in_every_build_of_torch(script: str, process: SharedWorker, tmp_path: Path) -> None:
    jobs: dict[str, Job] = {layout: (values(layout), 0, {}) for layout in (*LAYOUTS, GROUPED_QUERIES)}
    found = {}
    for layout, told in zip(jobs, reports_in(script, tmp_path, jobs.values()), strict=True):
        assert told["device"] is None
        if different := differences(process.report(*jobs[layout][:2]), told):
            found[layout] = different
    assert not found


@pytest.mark.parametrize("script", BUILDS)
def test_inductor_generates_no_more_kernels_in_any_build_of_torch(script: str) -> None:
    code = (
        "import runpy, sys; sys.path.append(sys.argv.pop()); "
        "runpy.run_module('benchmarks.inductor_kernels', run_name='__main__')"
    )
    shell = f". {shlex.quote(script)} && exec {shlex.join(['python', '-c', code, sysconfig.get_path('purelib')])}"
    done = subprocess.run(["bash", "-c", shell], cwd=repository(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not excess(done.stdout)
