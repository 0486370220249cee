"""Where traces are kept, which of them are believed, and how a user sees that they are measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from pangu.config.cluster import DeviceMemoryConfig
from pangu.dryrun import cache, roles, traces
from pangu.dryrun.cache import cache_folder, read_cached
from pangu.dryrun.roles import DryRunError
from pangu.dryrun.traces import TraceRequest, Traces, Way
from pangu.schedule.spans import Segment, Span, Trace, UpdateTrace
from tests.configs import config

REQUEST = TraceRequest(config("+config=quickstart"), (("embedding", "layer", "layer", "head"),))
UPDATE = UpdateTrace(*[0.0] * len(UpdateTrace._fields))


def measured(request: TraceRequest, nbytes: int = 8) -> Trace:
    """A trace of a request."""
    span = Span((Segment(nbytes, nbytes),))
    keys = sorted(key for chunk in request.chunks for key in request.keys(chunk))
    return Trace(dict.fromkeys(keys, span), span, span, span, UPDATE)


@pytest.mark.parametrize(
    "content", ["", "[", "{}", '[{"phases": {}, "update": {}}]', '{"digest": "", "found": []}', "\xff"]
)
def test_a_file_that_nobody_can_have_measured_is_not_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.pickle"
    file.write_text(content, encoding="latin-1")
    assert read_cached(file) is None
    assert read_cached(tmp_path) is None


def test_a_file_that_someone_else_may_have_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a pickle runs code."""
    file = tmp_path / "trace.pickle"
    cache.write_cached(file, "measured")
    assert read_cached(file) == "measured"
    tmp_path.chmod(0o777)
    assert read_cached(file) is None
    tmp_path.chmod(0o755)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert read_cached(file) is None


def test_the_folder_is_the_users_or_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "pangu"
    assert cache_folder() == folder
    folder.chmod(0o777)
    assert cache_folder() != folder
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary = tmp_path / f"pangu-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert cache_folder() == temporary
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user who is a mere number
    assert cache_folder() == temporary / ".cache" / "pangu"


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TraceRequest]:
    """Requests that would be measured in dry runs, in an empty folder; each measures one byte more."""
    requests: list[TraceRequest] = []

    def carry_out(missing: Sequence[tuple[Way, TraceRequest]]) -> Iterator[tuple[Way, Trace]]:
        for way, request in missing:
            requests.append(request)
            yield way, measured(request, len(requests))

    monkeypatch.setattr(traces, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(traces, "_carry_out", carry_out)
    return requests


def test_what_was_measured_is_kept_and_a_damaged_file_is_measured_again(
    carried_out: list[TraceRequest], tmp_path: Path
) -> None:
    first = Traces().measure([REQUEST])[0]
    assert Traces().measure([REQUEST])[0] == first
    assert carried_out == [REQUEST]
    (file,) = tmp_path.glob("trace-*")
    file.write_text("[{", encoding="utf-8")
    assert Traces().measure([REQUEST])[0] != first
    assert carried_out == [REQUEST, REQUEST]


def test_chunks_that_are_new_are_measured_and_join_the_others(carried_out: list[TraceRequest]) -> None:
    """Those with the same neighbours are not new; layers that are recomputed are."""
    Traces().measure([REQUEST])
    longer = ("embedding", *["layer"] * 9, "head")
    recomputed = ("embedding", "layer recomputed", "layer", "head")
    both = REQUEST._replace(chunks=(REQUEST.chunks[0], recomputed))
    known = Traces()
    (trace,) = known.measure([both])
    assert carried_out[1:] == [REQUEST._replace(chunks=(recomputed,))]
    assert trace.spans.keys() == both.keys(both.chunks[0]) | both.keys(recomputed)
    known.measure([REQUEST._replace(chunks=(longer,))])
    assert len(carried_out) == 3  # a layer between two others
    known.measure([REQUEST._replace(chunks=(("embedding", *["layer"] * 5, "head"),))])
    assert len(carried_out) == 3


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have dry runs give these reports, and nothing in the cache."""

    def answer(*reports: Mapping[str, Any]) -> None:
        monkeypatch.setattr(roles, "run_jobs", lambda jobs: islice(cycle(reports), len(jobs)))

    monkeypatch.setattr(traces, "cache_folder", lambda: tmp_path)
    return answer


def test_traces_of_a_cpu_are_refused_and_not_kept(answer: Callable[..., None], tmp_path: Path) -> None:
    """A forecast or search would be of another device: 75 times as many launches."""
    answer({"device": "no C++ compiler found", "traces": [measured(REQUEST)]})
    with pytest.raises(DryRunError, match=r"the dry run is unavailable: no C\+\+ compiler found"):
        Traces().measure([REQUEST])
    assert not list(tmp_path.glob("trace-*"))


def test_memory_of_a_cpu_is_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where traces are in the cache already, nothing else asks for a device."""
    report = {"device": "no C++ compiler found", "peak": 1, "groups": []}
    monkeypatch.setattr(roles, "run_jobs", lambda jobs, **_: iter([report]))
    with pytest.raises(DryRunError, match=r"the dry run is unavailable: no C\+\+ compiler found"):
        roles.measured_gib([({}, 0)], DeviceMemoryConfig(80.0, 1.0, 1.0, 0.0, 0.0, 2000.0, 0.8))


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_measuring_shows_its_progress(
    answer: Callable[..., None], seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, at the end, and every so often where no bar can be drawn; whoever waits for it is told."""
    answer({"device": None, "traces": [measured(REQUEST)]})
    monkeypatch.setattr(roles, "REPORT_SECONDS", seconds)
    requests = [
        REQUEST._replace(config=config("+config=quickstart", f"parallel.tensor={tensor}")) for tensor in (1, 2, 4)
    ]
    noted: list[int] = []
    monkeypatch.setattr(roles, "_workers", None)
    with roles.kept_workers(lambda: noted.append(1)):
        Traces().measure(requests)
    said = capsys.readouterr().err
    assert said.startswith("counting     operations of the layers, in 3 dry runs\n")
    assert ("counting     2 of 3 dry runs done" in said) is (seconds == 0)
    assert "3/3" in said
    assert len(noted) == 3
