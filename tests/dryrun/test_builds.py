"""The dry run counts the same in every build of torch.

PANGU_TORCH_BUILDS names scripts, separated by colons, each of which activates an environment with another build for the
Python of this process: torch's CUDA build without a GPU, with one, another version. `.ci/run` makes one.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from pangu.dryrun.roles import Worker
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import LAYOUTS, values

BUILDS = [script for script in os.environ.get("PANGU_TORCH_BUILDS", "").split(os.pathsep) if script]
GROUPED_QUERIES = (
    "parallel.context=2 batch.global_size=2 precision=bf16 model.positions=rope model.kv_heads=2 model.norm=rmsnorm "
    "model.activation=swiglu"
)
SERVE = """
import runpy
import sys

sys.path.append(sys.argv.pop())
runpy.run_module("pangu.dryrun", run_name="__main__")
"""
"""Everything but torch comes from the environment of this process."""


def worker_in(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker that `script` has given another torch."""
    program = folder / "python"
    own = shlex.join(["python", "-c", SERVE, sysconfig.get_path("purelib")])
    program.write_text(f"#!/bin/bash\n. {shlex.quote(script)}\nexec {own}\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != sysconfig.get_path("purelib")])
    try:
        return Worker()
    finally:
        monkeypatch.undo()


def differences(one: Any, other: Any, path: str = "") -> dict[str, Any]:
    """Values that differ by their place in nested reports."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        parts = (differences(one.get(key), other.get(key), f"{path}/{key}") for key in keys)
        return {place: pair for part in parts for place, pair in part.items()}
    return {} if one == other else {path: (one, other)}


@pytest.mark.parametrize("script", BUILDS)
def test_a_dry_run_counts_the_same_in_every_build_of_torch(
    script: str, process: SharedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, found = worker_in(script, tmp_path, monkeypatch), {}
    try:
        for layout in (*LAYOUTS, GROUPED_QUERIES):
            reports = [one.report(values(layout), 0) for one in (process, worker)]
            assert reports[1]["device"] is None
            if different := differences(*reports):
                found[layout] = different
    finally:
        worker.end()
    assert not found
