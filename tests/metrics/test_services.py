"""Trackers get each step, a resumed run continues its curves, and a tracker that nobody knows is named at the start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pangu.common.errors import ConfigError
from pangu.metrics import services
from pangu.metrics.record import StepRecord
from pangu.metrics.services import SERVICES, service_of
from pangu.metrics.trackers import TrackedRun, TrackerWriter, tracked

Make = Callable[..., StepRecord]
CONFIG = {"model": {"layers": 2}, "train": {"steps": 3}}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, MagicMock]:
    """Stand in for the packages of all trackers."""
    made = {name: MagicMock() for name in ("mlflow", "mlflow.entities", "comet_ml", "aim", "swanlab")}
    client = made["mlflow"].MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "of-mlflow"
    made["mlflow.entities"].Metric = made["mlflow.entities"].Param = lambda *values: values
    made["comet_ml"].get_config.return_value = None
    made["aim"].Run.return_value.hash = "of-aim"
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("MLFLOW_TRACKING_URI", "AIM_REPO", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return made


def track(name: str, output: Path, records: list[StepRecord], resumed_step: int = 0) -> None:
    writer = TrackerWriter(service_of(name), TrackedRun(output, CONFIG, "zh", "a", "b", ("c",), resumed_step))
    for one in records:
        writer.write(one)
    writer.close()


def test_mlflow_gets_configuration_steps_and_end(tmp_path: Path, record: Make, packages: dict[str, MagicMock]) -> None:
    client = packages["mlflow"].MlflowClient.return_value
    track("mlflow", tmp_path, [record(step=1), record(step=2)])
    packages["mlflow"].MlflowClient.assert_called_once_with(f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db")
    calls = [call.kwargs for call in client.log_batch.call_args_list]
    assert calls[1] == {"params": [("model.layers", "2"), ("train.steps", "3")]}
    for step, call in enumerate(calls[2:], 1):
        assert [(name, value, at) for name, value, _, at in call["metrics"]] == [
            (name, value, step) for name, value in tracked(record(step=step)).items()
        ]
    client.set_terminated.assert_called_once_with("of-mlflow", "FINISHED")
    client.create_run.reset_mock()
    track("mlflow", tmp_path, [record(step=3)], resumed_step=2)
    client.create_run.assert_not_called()
    assert client.log_batch.call_args.args == ("of-mlflow",)


@pytest.mark.parametrize(
    ("name", "starts", "key", "logs", "ends"),
    [
        ("comet", "comet_ml.start", "experiment_key", "log_metrics", "end"),
        ("aim", "aim.Run", "run_hash", "track", "close"),
        ("swanlab", "swanlab.init", "id", "log", "finish"),
    ],
)
def test_a_tracker_gets_every_step_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, record: Make, packages: dict[str, MagicMock], name: str, starts: str, key: str, logs: str, ends: str
) -> None:
    package, _, function = starts.partition(".")
    start = getattr(packages[package], function)
    track(name, tmp_path, [record(step=1), record(step=2)])
    begun = start.return_value
    assert [call.args[0] for call in getattr(begun, logs).call_args_list] == [tracked(record(step=s)) for s in (1, 2)]
    assert [call.kwargs for call in getattr(begun, logs).call_args_list] == [{"step": 1}, {"step": 2}]
    getattr(begun, ends).assert_called_once()
    kept = (tmp_path / "trackers" / name / "run-id").read_text()
    track(name, tmp_path, [record(step=3)], resumed_step=2)
    assert start.call_args.kwargs[key] == kept
    assert "zh" in [start.call_args.kwargs.get(key) for key in ("project", "project_name", "experiment")]


def test_the_tracker_of_another_package_is_an_entry_point(
    tmp_path: Path, record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("mine", "tests.metrics.test_services:start_mine", services.GROUP)
    monkeypatch.setattr(services, "entry_points", lambda group: [entry])
    track("mine", tmp_path, [record(step=1)])
    assert [("zh", "a"), (tracked(record(step=1)), 1), 0] == MINE
    with pytest.raises(ConfigError, match=r"metrics\.trackers.*nobody.*aim, comet, mine, mlflow, swanlab") as caught:
        service_of("nobody")
    assert caught.value.problems[0].key == "metrics.trackers"


MINE: list[Any] = []
"""What the tracker below was given."""


class Mine:
    """Tracker as a package of somebody else has it."""

    def log(self, figures: dict[str, float], step: int) -> None:
        MINE.append((figures, step))

    def finish(self, status: int) -> None:
        MINE.append(status)


def start_mine(run: TrackedRun) -> Mine:
    MINE.append((run.project, run.name))
    return Mine()


@pytest.mark.parametrize("name", SERVICES)
def test_real_offline_run_and_its_continuation(tmp_path: Path, name: str) -> None:
    pytest.importorskip(SERVICES[name].package)
    code = """
        import sys
        from pathlib import Path
        from pangu.metrics.record import StepRecord
        from pangu.metrics.services import service_of
        from pangu.metrics.trackers import TrackedRun, TrackerWriter

        for begin in (0, 3):
            run = TrackedRun(Path("run"), {"model": {"layers": 2}}, "zh", "a", "b", ("c",), begin)
            writer = TrackerWriter(service_of(sys.argv[1]), run)
            for step in range(begin + 1, begin + 4):
                writer.write(StepRecord(step, 10, 5.0, 1e-3, 1.0, 1.0, 10.0, 1.0, None, 1.0, 0, None))
            writer.close()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    (tmp_path / "run").mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "script.py", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "disabled" not in done.stderr, done.stderr
    folder = tmp_path / "run" / "trackers" / name
    assert re.fullmatch(r"[0-9a-f]{16,32}", (folder / "run-id").read_text())
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > 1000
