"""tools/calibrate.py: what it measures is a cluster's file that plans are made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pangu.calibration.links import latency_and_bandwidth
from pangu.common.exit_status import INTERRUPTED, USER_ERROR
from pangu.planning.cost import matmul_seconds
from pangu.planning.search import search, space_of
from pangu.report.clusters import load_cluster
from pangu.schedule.spans import Matmul
from pangu.topology.launch import Launch
from tests.configs import config
from tests.end_to_end.commands import on_ranks
from tests.report.test_auto import there_are
from tests.spawn import repository
from tools import calibrate


def test_one_process_measures_all_but_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert calibrate.main(["--output", str(path), "--quick"]) == 0
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


def test_a_device_without_memory_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. 1.00 GiB is free.")

    monkeypatch.setattr(calibrate, "measure_machine", measure)
    assert calibrate.main(["--output", str(tmp_path / "mine.yaml"), "--quick"]) == USER_ERROR
    said = "(cpu): out of memory, 2.00 GiB requested, 1.00 GiB free; end other programs that use this memory"
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("formulas")
def test_two_processes_measure_links_and_a_search_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = on_ranks(2, "tools/calibrate", "--output", path, "--quick")
    assert done.returncode == 0, done.stderr
    cluster = load_cluster(path)
    assert (cluster.devices, cluster.node) == (2, 2)
    assert 0.001 < cluster.inside.gb_s < 1000
    assert "inside" not in path.read_text(encoding="utf-8").splitlines()[1]
    sent, worked = ({row[2:] for row in cluster.inside.measured if row[0] == kind} for kind in ("send", "message"))
    assert {nbytes for nbytes, _ in sent} == {nbytes for nbytes, _ in worked} != set()
    best = search(space_of(config("+config=quickstart"), cluster, {})).best
    assert best[0].time.total > 0


def test_a_link_on_a_busy_machine_is_at_most_twice_as_fast_as_its_fastest_message() -> None:
    per_us, per_gb_s = [2e-6, 2e-6, 2e-6], [7e-5, 1e-3, 2e-2]
    terms = np.array([per_us, per_gb_s]).T
    quiet_s, busy_s = terms @ [30.0, 1 / 4], np.full(3, 5e-3)
    assert latency_and_bandwidth(terms / quiet_s[:, None]) == pytest.approx((30.0, 4.0))
    assert latency_and_bandwidth(terms / busy_s[:, None])[1] == pytest.approx(2 * 2e-2 / 5e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "/nowhere/mine.yaml"), "cannot write /nowhere/mine.yaml: No such file or directory"),
        (("--output", "/proc/mine.yaml"), "cannot write /proc/mine.yaml"),
        (("--output", "/tmp"), "must be a file NAME.yaml, for cluster=NAME"),
        (("--output", "configs/cluster/.yaml"), "must be a file NAME.yaml, for cluster=NAME"),
        (("--output", "configs/cluster/a100.yaml"), "exists and was not written by this tool"),
        (("--output", "mine.yaml", "--like", "abacus"), "no such file; use one of a100, a100_40gb, ascend910,"),
        (("--output", "mine.yaml", "--like", "ascend910_2048"), "no such file; use one of a100, a100_40gb, ascend910,"),
    ],
)
def test_wrong_arguments_end_in_one_message_before_anything_is_measured(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(calibrate, "measure_machine")
    monkeypatch.chdir(repository())
    assert calibrate.main(list(arguments)) == 2
    assert says in capsys.readouterr().err


def test_a_measurement_that_is_given_up_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "mine.yaml"
    path.write_text("# Measured by tools/calibrate.py on this machine\n", encoding="utf-8")
    monkeypatch.setattr(calibrate, "measure_machine", interrupt)
    assert calibrate.main(["--output", str(path)]) == INTERRUPTED
    assert [one.name for one in tmp_path.iterdir()] == ["mine.yaml"]
    assert path.read_text(encoding="utf-8").endswith("machine\n")


def test_a_device_is_like_its_file_and_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(monkeypatch, "NVIDIA H200", 139.5)
    assert calibrate._borrowed("", Launch()).name == "h200"
    assert calibrate._borrowed("a100", Launch()).memory.gib == 139.5
    there_are(monkeypatch, "Abacus", 1)
    assert calibrate._borrowed("", Launch()).name == "a100"
