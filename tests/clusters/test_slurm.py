"""Slurm itself runs the script; tests/clusters/slurm.py says what that needs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pangu.data.stdlib import StdlibPaths
from tests.clusters.slurm import is_here, slurm, wait_until
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics

STEPS = 600
"""Of the quickstart: more than a minute, within which Slurm looks at limits twice."""
pytestmark = [pytest.mark.long, pytest.mark.skipif(not is_here(), reason="needs root, slurm-wlm and munge")]


def test_quickstart_continues_bit_for_bit_when_its_job_is_queued_again(prepared: StdlibPaths, tmp_path: Path) -> None:
    """Once by a command, as a scheduler does that needs the nodes, and once by itself, two minutes before its time
    limit, which is lowered for that."""
    words = ("+config=quickstart", SAME_ATTENTION, SAME_PRODUCTS, f"data.folder={prepared.folder}", "metrics.wandb=off")
    words += (f"train.steps={STEPS}",)
    limits = ("--time=60", "--signal=B:USR1@120")
    output = tmp_path / "broken"

    def steps() -> int:
        path = output / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    with slurm(tmp_path / "slurm") as cluster:
        unbroken = cluster.submit("whole", *words, f"train.output={tmp_path / 'whole'}", options=limits)
        assert cluster.wait(unbroken, 1800)["JobState"] == "COMPLETED"
        job = cluster.submit("broken", *words, f"train.output={output}", options=limits)
        wait_until(lambda: steps() > STEPS // 10, 600)
        cluster.run("scontrol", "requeue", job)
        wait_until(lambda: cluster.state(job)["Restarts"] == "1" and steps() > STEPS // 3, 600)
        hours, minutes, _ = map(int, cluster.state(job)["RunTime"].split(":"))
        cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
        wait_until(lambda: cluster.state(job)["Restarts"] == "2", 300)
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        ended = cluster.wait(job, 1800)
        said = (cluster.folder / "broken.out").read_text()
        print(said)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
        assert ended["Restarts"] == "2"
    stops = list(map(int, re.findall(r"stopped after step (\d+)", said)))
    starts = list(map(int, re.findall(r"continuing from .* \(step (\d+)\)", said)))
    assert stops == starts
    assert len(set(stops)) == 2
    folders, figures = (tmp_path / "whole", output), ("step", "loss", "grad_norm")
    runs = [[[line[name] for name in figures] for line in metrics(folder)] for folder in folders]
    assert runs[0] == runs[1]
    last = f"checkpoints/step-{len(runs[0]):08d}/index.json"
    weights = [json.loads((folder / last).read_text())["files"] for folder in folders]
    assert weights[0] == weights[1]  # checksums
    rows = json.loads((output / "nodes.json").read_text())
    assert [(row["rank"], row["local_rank"]) for row in rows] == [(0, 0), (1, 0)]
    logs = cluster.folder / "broken" / "start-0"
    assert all(list(logs.glob(f"{node}/*/attempt_0/0/stderr.log")) for node in ("node0", "node1"))


def test_an_array_makes_a_run_of_each_line(tmp_path: Path) -> None:
    """With the layout that the line says; a task without a line ends with status 2."""
    lines = {"zero": "parallel.zero=3", "tensor": "parallel.tensor=2"}
    overrides = tmp_path / "layouts.txt"
    overrides.write_text("".join(f"{words} train.output={tmp_path / name}\n" for name, words in lines.items()))
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "train.steps=3")
    with slurm(tmp_path / "slurm") as cluster:
        array = cluster.submit("array", *words, options=("--array=1-3",), OVERRIDES=str(overrides))
        wait_until(lambda: set(cluster.tasks(array)) <= {"COMPLETED", "FAILED"}, 600)
        said = (cluster.folder / "array.out").read_text()
        print(said)
        assert sorted(cluster.tasks(array)) == ["COMPLETED", "COMPLETED", "FAILED"], said
    assert f"error: {overrides} has no line 3 (--array)" in said
    assert [len(metrics(tmp_path / name)) for name in lines] == [3, 3]
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
