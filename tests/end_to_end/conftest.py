"""What several tests look at is made once for the session, whichever of pytest-xdist's processes needs it first."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from pangu.data.stdlib import StdlibPaths
from tests.end_to_end.commands import SMALL, pretrain
from tests.tasks.files import write_benchmarks


@pytest.fixture(scope="session")
def folder(session_folder: Path, prepared: StdlibPaths) -> Path:
    """A run folder as the quickstart leaves it, only smaller, measured at its end, with all benchmarks in `benchmarks`.
    Not to be changed."""
    path = session_folder / "trained"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            (path / "benchmarks").mkdir(parents=True)
            write_benchmarks(path / "benchmarks")
            words = (*SMALL, "train.steps=20", "validation.every=0", "lr_schedule.warmup_steps=1")
            words += (f"data.folder={prepared.folder}",)
            measured = ("evaluate.every=20", "evaluate.tasks=[afqmc,lambada]", f"evaluate.data={path}/benchmarks")
            done = pretrain(path, "+config=quickstart", *words, *measured, "sample.tokens=4")
            assert done.returncode == 0, done.stderr
            assert "lambada/word_perplexity" in done.stderr + done.stdout
    return path
