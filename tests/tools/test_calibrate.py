"""tools/calibrate.py: what it measures is a cluster's file that plans are made from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pangu.planning.cluster import load_cluster
from pangu.planning.cost import matmul_seconds
from pangu.planning.search import search, space_of
from pangu.planning.workload import Matmul
from tests.configs import config
from tests.spawn import repository
from tools.calibrate import main


def test_one_process_measures_all_but_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["--output", str(path), "--quick"]) == 0
    assert "borrowed: " in capsys.readouterr().out
    cluster = load_cluster(path)
    assert cluster.name == "mine"
    assert cluster.devices == 1
    assert 0.001 < cluster.matmul.tflops < 1000
    assert 0.1 < cluster.memory.gb_s * cluster.memory.efficiency < 20_000
    assert 0.01 < cluster.launch_us < 1000
    rows, columns, depth, share = cluster.matmul.measured[0]
    product = Matmul(int(rows), int(columns), int(depth))
    assert matmul_seconds(product, cluster) == pytest.approx(product.flops / (cluster.matmul.tflops * 1e12 * share))
    assert "Borrowed, not measured: " in path.read_text(encoding="utf-8")


def test_two_processes_measure_links_and_a_search_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "tools/calibrate.py"]
    done = subprocess.run(
        [*command, "--output", str(path), "--quick"],
        cwd=repository(),
        env={**os.environ, "PYTHONPATH": str(repository())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cluster = load_cluster(path)
    assert (cluster.devices, cluster.node) == (2, 2)
    assert 0.001 < cluster.inside.gb_s < 1000
    assert "inside" not in path.read_text(encoding="utf-8").splitlines()[1]
    best = search(space_of(config("+config=quickstart"), cluster, {})).best
    assert best[0].time.total > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "/nowhere/mine.yaml"), "there is no folder /nowhere"),
        (("--output", "mine.yaml", "--like", "abacus"), "there is no such file"),
    ],
)
def test_wrong_arguments_end_in_one_message(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) != 0
    assert says in capsys.readouterr().err
