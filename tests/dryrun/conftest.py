"""One pool of processes with the fake device serves all tests of a process of pytest: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pangu.dryrun import traces
from pangu.dryrun.roles import kept_workers, run_jobs


class SharedWorker:
    """Carries out ranks in the processes that are there, or in one of its own."""

    def report(self, values: Mapping[str, Any], rank: int, **options: Any) -> dict[str, Any]:
        """The report of a rank."""
        (report,) = run_jobs([(values, rank, options)])
        return report


@pytest.fixture(scope="session")
def process() -> Iterator[SharedWorker]:
    """Carries out ranks."""
    with kept_workers():
        yield SharedWorker()


@pytest.fixture
def commands_share_it(process: SharedWorker) -> None:
    """Functions of this process that would start workers take those of the session instead."""


@pytest.fixture
def session_cache(session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the tests of a session measure."""
    folder = session_folder / "cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(traces, "cache_folder", lambda: folder)
