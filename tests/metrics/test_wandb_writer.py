"""wandb may fail in every way it likes: training gets one warning and goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb

from pangu.metrics import trackers
from pangu.metrics.record import StepRecord
from pangu.metrics.services import logged_in, wandb_service
from pangu.metrics.trackers import TrackedRun, TrackerWriter, tracked

Make = Callable[..., StepRecord]


def writer_of(output: Path, mode: str, config: dict[str, Any] | None = None) -> TrackerWriter:
    return TrackerWriter(wandb_service(mode), TrackedRun(output, config or {}, "zh", "a", "b", ("c",)))


class FakeRun:
    """Stands in for wandb's run."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.alerts: list[tuple[str, str, str, int]] = []
        self.exit_code: int | None = None

    def alert(self, title: str, text: str, level: str, wait_duration: int) -> None:
        self.alerts.append((title, text, level, wait_duration))

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces wandb.init; holds the arguments of every call."""
    received: list[dict[str, Any]] = []

    def init(**arguments: Any) -> FakeRun:
        received.append(arguments | {"run": (run := FakeRun())})
        return run

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    return received


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_every_step_reaches_wandb(tmp_path: Path, record: Make, calls: list[dict[str, Any]], caplog: Any) -> None:
    writer = writer_of(tmp_path, "offline", {"model": {"layers": 2}})
    for step in (1, 2):
        writer.write(record(step=step))
    writer.close()
    (call,) = calls
    assert call["run"].logged == [(tracked(record()), 1), (tracked(record()), 2)]
    assert call["run"].exit_code == 0
    assert (call["project"], call["dir"], call["mode"]) == ("zh", str(tmp_path), "offline")
    assert (call["name"], call["group"], call["tags"]) == ("a", "b", ("c",))
    assert call["config"] == {"model": {"layers": 2}}
    assert warnings_of(caplog) == []


def test_alerts_of_the_log_reach_wandb(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    writer, log = writer_of(tmp_path, "offline"), logging.getLogger("pangu")
    log.warning("step %d: rolling back", 3, extra={"alert": "rollback"})
    log.warning("nobody needs to see this now")
    log.warning("fp16 skips steps", extra={"alert": None})
    writer.close()
    log.warning("too late", extra={"alert": "rollback"})
    assert calls[0]["run"].alerts == [("rollback", "step 3: rolling back", "WARN", 60)]


def test_a_run_that_fails_is_marked_as_failed(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    writer = writer_of(tmp_path, "offline")

    def train() -> None:
        try:
            raise FloatingPointError("diverged")
        finally:
            writer.close()

    with pytest.raises(FloatingPointError, match="diverged"):
        train()
    assert calls[0]["run"].exit_code == 1


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k" * 40}, "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_auto_is_online_only_if_logged_in(
    tmp_path: Path,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    mode: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    writer_of(tmp_path, "auto").close()
    assert [call["mode"] for call in calls] == [mode]


def test_online_without_a_key_says_what_to_do(tmp_path: Path, calls: list[dict[str, Any]], caplog: Any) -> None:
    writer_of(tmp_path, "online").close()
    assert calls == []  # wandb would have asked for a key on the terminal
    (warning,) = warnings_of(caplog)
    assert "wandb login" in warning


@pytest.mark.usefixtures("calls")
def test_logged_in_reads_netrc_for_the_right_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert not logged_in()
    monkeypatch.setenv("NETRC", str(netrc))
    assert logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not logged_in()
    for useless in ("machine wandb.example.org login user", "machin wandb.example.org"):
        netrc.write_text(useless)
        assert not logged_in()
    netrc.write_text("machine wandb.example.org login user password secret")
    assert logged_in()
    monkeypatch.setenv("NETRC", str(tmp_path / "missing"))
    assert not logged_in()


@pytest.mark.usefixtures("calls")
def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(tmp_path: Path) -> None:
    new, resumed = (TrackedRun(tmp_path, {}, "zh", resumed_step=step) for step in (0, 10))
    assert resumed.known_id("wandb") is None
    assert new.keep_id("wandb", "first") == "first"
    assert resumed.known_id("wandb") == "first"
    assert (tmp_path / "wandb" / "run-id").read_text() == "first"
    assert new.known_id("wandb") is None
    assert resumed.known_id("mlflow") is None


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_failure_during_the_run_is_one_warning(
    tmp_path: Path,
    record: Make,
    calls: list[dict[str, Any]],
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("Connection lost\nand much more")

    torn_down: list[bool] = []
    monkeypatch.setattr(FakeRun, method, fail)
    monkeypatch.setattr(wandb, "teardown", lambda: torn_down.append(True))
    writer = writer_of(tmp_path, "offline")
    for step in range(1, 50):
        writer.write(record(step=step))
        time.sleep(0.001)
    writer.close()
    writer._thread.join()
    assert warnings_of(caplog) == [
        ("wandb is disabled for the rest of this run (ConnectionResetError: Connection lost)")
    ]
    assert torn_down == [True]


def test_a_broken_installation_is_one_warning(tmp_path: Path, record: Make, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises ImportError
    writer = writer_of(tmp_path, "offline")
    writer.write(record())
    writer.close()
    assert len(warnings_of(caplog)) == 1


def test_a_server_that_does_not_answer_holds_up_nothing(
    tmp_path: Path, record: Make, calls: list[dict[str, Any]], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, answered = threading.Event(), threading.Event()

    def init(**_: object) -> None:
        answer.wait(300)
        answered.set()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(trackers, "START_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    writer = writer_of(tmp_path, "offline")
    writer.write(record())
    writer.close()
    assert not answered.is_set()
    answer.set()  # it comes back too late, and with something that is not a run
    writer._thread.join()
    assert len(warnings_of(caplog)) == 1


def run_in_process(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run real wandb in a fresh process, because it keeps state for the whole process."""
    code = """
        from pathlib import Path
        from pangu.metrics.record import StepRecord
        from pangu.metrics import services, trackers
        from pangu.metrics.trackers import TrackedRun, TrackerWriter

        def use(mode, resumed_step=0):
            run = TrackedRun(Path("run"), {"model": {"layers": 2}}, "pangu-tests", resumed_step=resumed_step)
            writer = TrackerWriter(services.wandb_service(mode), run)
            for step in range(resumed_step + 1, resumed_step + 4):
                writer.write(StepRecord(step, 10, 5.0, 1e-3, 1.0, 1.0, 10.0, 1.0, None, 1.0, 0, None))
            writer.close()
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code) + textwrap.dedent(body))
    (tmp_path / "run").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    root = str(Path(__file__).parents[2])
    variables = kept | {"PYTHONPATH": root, "NETRC": os.devnull, "HOME": str(tmp_path)} | environment
    return subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )


def test_real_offline_run_and_its_continuation_say_nothing_and_share_an_id(tmp_path: Path) -> None:
    done = run_in_process(tmp_path, "use('auto'); use('auto', resumed_step=3)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    folder = tmp_path / "run" / "wandb"
    name = (folder / "run-id").read_text()
    logs = list(folder.glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert logs
    assert all(log.stat().st_size > 100 for log in logs)


def test_a_thread_that_hangs_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    body = """
        import threading, wandb
        wandb.init = lambda **_: threading.Event().wait()
        trackers.START_SECONDS = trackers.FINISH_SECONDS = 0.1
        use("offline")
    """
    done = run_in_process(tmp_path, body)
    assert (done.returncode, done.stdout) == (0, "")
    assert "TimeoutError" in done.stderr


def test_real_run_without_a_network_is_one_line(tmp_path: Path) -> None:
    # Nothing listens on port 9 (discard) of this machine.
    body = "services.START_SECONDS = 1; use('auto')"
    done = run_in_process(tmp_path, body, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("wandb is disabled for the rest of this run")
