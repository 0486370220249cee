"""One process with the fake device serves all tests of a process of pytest: it takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from pangu.dryrun import roles, traces
from pangu.dryrun.roles import Worker


class SharedWorker:
    """A worker that is started when it is first asked and stays when a caller ends it; one caller at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: Worker | None = None

    def report(self, values: Mapping[str, Any], rank: int, **options: Any) -> dict[str, Any]:
        """As `Worker.report`."""
        with self._lock:
            self._worker = self._worker or Worker()
            return self._worker.report(values, rank, **options)

    def end(self) -> None:
        """For its callers."""

    def close(self) -> None:
        """For the session."""
        if self._worker is not None:
            self._worker.end()


@pytest.fixture(scope="session")
def process() -> Iterator[SharedWorker]:
    """Carries out ranks."""
    worker = SharedWorker()
    yield worker
    worker.close()


@pytest.fixture
def commands_share_it(process: SharedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called in this process and would start workers takes that one instead."""
    monkeypatch.setattr(roles, "Worker", lambda: process)


@pytest.fixture
def session_cache(session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the tests of a session measure."""
    folder = session_folder / "cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(traces, "cache_folder", lambda: folder)
