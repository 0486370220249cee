"""The correction of a cluster's figures by a profiled run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint.run_folder import save_config
from pangu.config.cluster import ClusterConfig, LinkConfig
from pangu.planning.cost import step_time
from pangu.report.clusters import load_cluster
from pangu.report.correction import ProfiledRun
from pangu.training.profile import PARTS
from tests.configs import config
from tests.spawn import repository
from tools import calibrate

A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
HOST = replace(A100, matmul=replace(A100.matmul, tflops_fp8=600.0), queued=False, devices=2, node=2, step_us=1000.0)


def slower(cluster: ClusterConfig) -> ClusterConfig:
    """What a cluster really is: slower at computing, on slower links, with a longer end of a step."""
    matmul, memory = cluster.matmul, cluster.memory
    return replace(
        cluster,
        matmul=replace(matmul, efficiency=matmul.efficiency / 1.7, attention=matmul.attention / 1.4),
        memory=replace(memory, efficiency=memory.efficiency / 2),
        inside=LinkConfig(3 * cluster.inside.latency_us, cluster.inside.gb_s / 2.5),
        step_us=9000.0,
    )


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("cluster", [replace(HOST, queued=True), HOST], ids=["device", "host"])
@pytest.mark.parametrize("words", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.data=2"])
def test_a_plan_with_the_corrected_file_is_nearer_to_the_run(
    words: str,
    cluster: ClusterConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {**asdict(cluster), "matmul": {**asdict(cluster.matmul), "measured": []}}
    save_config(tmp_path, replace(config("+config=quickstart", words), cluster=given))
    (tmp_path / "summary.json").write_text(json.dumps({"devices": 2, "profile": {"ranks": [{}, {}]}}), encoding="utf-8")
    assert calibrate.main(["--from", str(tmp_path), "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "summary.json: is not the summary of a run" in capsys.readouterr().err
    profile = {"ranks": [dict.fromkeys(PARTS, 0.01)] * 2}
    (tmp_path / "summary.json").write_text(json.dumps({"devices": 2, "profile": profile}), encoding="utf-8")
    run = ProfiledRun.read(tmp_path)
    truth = vars(step_time(run.ledger, run.plan, slower(run.cluster)))
    profile = {"ranks": [{**dict.fromkeys(PARTS, 0.0), **truth}] * 2}
    (tmp_path / "summary.json").write_text(json.dumps({"devices": 2, "profile": profile}), encoding="utf-8")
    with monkeypatch.context() as second:
        second.setenv("RANK", "1")
        assert calibrate.main(["--from", str(tmp_path), "--output", str(tmp_path / "mine.yaml")]) == 0
    assert not (tmp_path / "mine.yaml").exists()
    assert calibrate.main(["--from", str(tmp_path), "--output", str(tmp_path / "mine.yaml")]) == 0
    *lines, total, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("seconds", "compute", "tensor", "expert", "pipeline", "data", "bubble", "update")
    ]
    _, before, measured, ratio, after = total.split()
    assert float(ratio) == pytest.approx(float(measured) / float(before), abs=0.02)
    mine = load_cluster(tmp_path / "mine.yaml")
    assert mine.matmul.tflops_fp8 == pytest.approx(600 * mine.matmul.tflops / cluster.matmul.tflops)
    save_config(tmp_path, replace(config("+config=quickstart", words), cluster=asdict(mine)))
    next_run = ProfiledRun.read(tmp_path)
    planned = next_run.forecast(next_run.cluster)
    assert sum(planned.values()) == pytest.approx(float(after), rel=1e-3)
    known, forecast = next_run.measured, run.forecast(run.cluster)
    errors = [sum(abs(one[part] - known[part]) for part in known) for one in (forecast, planned)]
    assert errors[1] < errors[0] / 4
    assert planned["compute"] == pytest.approx(known["compute"], rel=1e-3)


def test_a_run_without_a_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(tmp_path, config("+config=quickstart"))
    (tmp_path / "summary.json").write_text('{"devices": 1, "profile": null}', encoding="utf-8")
    assert calibrate.main(["--from", str(tmp_path), "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "has no forecast and profile to compare; finish a run of 20 steps with" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("ranks", [[], [0.01] * 2, [0.0], [-0.01], [float("inf")], [float("nan")]])
def test_times_of_no_step_are_refused(ranks: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(tmp_path, replace(config("+config=quickstart"), cluster=json.loads(json.dumps(asdict(A100)))))
    profile = {"ranks": [dict.fromkeys(PARTS, seconds) for seconds in ranks]}
    (tmp_path / "summary.json").write_text(json.dumps({"devices": 1, "profile": profile}), encoding="utf-8")
    assert calibrate.main(["--from", str(tmp_path), "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "summary.json: is not the summary of a run" in capsys.readouterr().err
    assert not (tmp_path / "mine.yaml").exists()
