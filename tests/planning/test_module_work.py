"""Where counts of modules are kept, and what of it is believed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from pangu.config.cluster import DeviceMemoryConfig
from pangu.dryrun import cache, roles
from pangu.dryrun.cache import cache_folder, read_cached
from pangu.dryrun.roles import DryRunError
from pangu.planning import module_work
from pangu.planning.module_work import ModuleCounts, Piece
from pangu.topology.layout import Layout
from tests.configs import config


@pytest.mark.parametrize(
    "content", ["", "[", "{}", '[{"phases": {}, "update": {}}]', '{"digest": "", "found": []}', "\xff"]
)
def test_a_file_that_nobody_can_have_counted_is_not_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "modules.json"
    file.write_text(content, encoding="latin-1")
    assert read_cached(file) is None
    assert read_cached(tmp_path) is None


def test_the_folder_is_the_users_or_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pangu"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary = tmp_path / f"pangu-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert cache_folder() == temporary
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user who is a mere number
    assert cache_folder() == temporary / ".cache" / "pangu"


def test_a_process_that_counts_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was counted before is read without waiting."""
    counted: list[int] = []
    counts, piece = ModuleCounts(config("+config=quickstart")), Piece(1, False)
    reports = [{"phases": {}, "update": {}}] * 2

    def carry_out(jobs: Mapping[Piece, object], note_progress: object) -> list[tuple[Piece, object]]:
        counted.append(len(jobs))
        return [(one, reports) for one in jobs]

    monkeypatch.setattr(module_work, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(module_work, "_carry_out", carry_out)
    monkeypatch.setattr(cache, "PATIENCE_SECONDS", 0.3)
    with (tmp_path / "modules.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        counts.count([(piece, 1)])
        assert time.monotonic() - began >= 0.3
        monkeypatch.setattr(module_work, "one_process", None)
        ModuleCounts(counts.config).count([(piece, 1)])
    assert counted == [1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have dry runs give these reports, and nothing in the cache."""

    def answer(*reports: dict[str, Any]) -> None:
        monkeypatch.setattr(module_work, "run_jobs", lambda jobs, **_: islice(cycle(reports), len(jobs)))

    monkeypatch.setattr(module_work, "cache_folder", lambda: tmp_path)
    return answer


def test_counts_of_a_cpu_are_refused_and_not_kept(alone: Callable[..., None], tmp_path: Path) -> None:
    """A forecast or search would be of another device: 75 times as many launches."""
    alone({"device": "no C++ compiler is found", "phases": {}, "update": {}})
    with pytest.raises(DryRunError, match="the dry run is unavailable: no C\\+\\+ compiler is found"):
        ModuleCounts(config("+config=quickstart")).count([(Piece(1, False), 1)])
    assert not list(tmp_path.glob("modules-*.json"))


def test_memory_of_a_cpu_is_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where counts are in the cache already, nothing else asks for a device."""
    report = {"device": "no C++ compiler is found", "peak": 1, "groups": []}
    monkeypatch.setattr(roles, "run_jobs", lambda jobs, **_: iter([report]))
    with pytest.raises(DryRunError, match="the dry run is unavailable: no C\\+\\+ compiler is found"):
        roles.measured_gib({}, Layout(), 0, DeviceMemoryConfig(80.0, 1.0, 1.0, 0.0, 0.0, 2000.0, 0.8))


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_counting_shows_its_progress(
    alone: Callable[..., None], seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, at the end, and every so often where no bar can be drawn; whoever waits for it is told."""
    alone({"device": None, "phases": {}, "update": {}})
    monkeypatch.setattr(roles, "REPORT_SECONDS", seconds)
    noted: list[int] = []
    ModuleCounts(config("+config=quickstart"), note_progress=lambda: noted.append(1)).count([(Piece(1, False), 3)])
    said = capsys.readouterr().err
    assert said.startswith("counting     what layers do, in 4 dry runs\n")
    assert ("counting     3 of 4 dry runs are done" in said) is (seconds == 0)
    assert "4/4" in said
    assert len(noted) == 4
