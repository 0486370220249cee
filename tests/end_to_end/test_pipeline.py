"""A pipeline from the command line: the same losses as one process, and one message when a stage is stuck."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import HANG, SMALL, command, metrics, pretrain, run_script
from tests.pace import at_some_pace
from tests.spawn import repository, run_ranks

QUIET = (*SMALL, "model.layers=4", "data=synthetic", "validation.every=0", "checkpoint.every=0", "train.steps=3")

STUCK = f"""
import os
from pathlib import Path

from pangu.pipeline.runner import Runner
from pangu.pretrain import pretrain

backward = Runner._backward
{HANG}

def perhaps(self, action):
    if os.environ["RANK"] == "1" and action.micro == 1:
        HAPPENS
    backward(self, action)


Runner._backward = perhaps
if __name__ == "__main__":
    pretrain(Path("ROOT") / "configs")
"""


def test_a_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """fp64, 1e-12 as in tests/parallel; in fp32 the sums of one process with more threads differ by more roundings."""
    assert pretrain(tmp_path / "one", *QUIET, "precision=fp64").returncode == 0
    keys = ("precision=fp64", "parallel.pipeline=2", "profile=true")
    done = pretrain(tmp_path / "two", *QUIET, *keys, processes=2)
    assert done.returncode == 0, done.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == 3
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=1e-12)
    names = (
        "pipeline.svg",
        "pipeline.png",
        "pipeline_measured.svg",
        "pipeline_measured.png",
        "profile.json",
        "profile.png",
    )
    assert all((tmp_path / "two" / "plots" / name).stat().st_size for name in names)
    listed = {path for _, _, path in (line.rpartition(" ") for line in done.stderr.splitlines())}
    shown = ("loss.png", "pipeline.svg", "pipeline_measured.svg", "profile.json", "profile.png")
    assert {str(tmp_path / "two" / "plots" / name) for name in shown} <= listed, done.stderr


def run_stuck(folder: Path, happens: str, launched: bool, pace: float = 1.0) -> str:
    """What a run says whose second stage does this in its second backward."""
    script = folder / "stuck.py"
    script.write_text(STUCK.replace("HAPPENS", happens).replace("ROOT", str(repository())), encoding="utf-8")
    words = (*QUIET, "parallel.pipeline=2", f"parallel.timeout_s={5 * pace}")
    done = command(str(script), *words, processes=2) if launched else run_ranks(2, run_script, str(script), *words)
    assert done.returncode not in (0, None)
    return done.stderr


@at_some_pace
def test_a_stuck_stage_ends_the_run_with_one_message(tmp_path: Path, pace: float) -> None:
    said = run_stuck(tmp_path, "hang()", launched=False, pace=pace)
    expected = "error: rank 0, stage 0, step 1: RECV_GRADIENT of chunk 0, micro-batch 1, peer stage 1: the peer did not"
    assert said.count(expected) == said.count("error: rank") == 1, said
    assert "StageError" not in said  # no traceback of ours; the launcher adds one of its own


def test_a_dead_stage_ends_the_run_at_once(tmp_path: Path) -> None:
    """The launcher names the process that died; the message of the others may come too late."""
    began = time.monotonic()
    said = run_stuck(tmp_path, "os._exit(7)", launched=True, pace=(limit_s := 300.0) / 5)
    assert re.search(r"rank *: 1 .*\n *exitcode *: 7", said), said
    assert time.monotonic() - began < limit_s
