"""The tests marked `gpu`; a row for each, as soon as it has ended."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from benchmarks.gpu_suite.setting import ROOT, Setting


class Rows:
    """Enters what pytest reports."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of set-up, call and tear-down."""
        if report.when != "call" and report.passed:
            return
        figures = {"outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            figures["error"] = str(report.longrepr)[-3000:]
        self._setting.add(report.nodeid, **figures)


def measure(setting: Setting) -> None:
    """Run them. Raises RuntimeError if they cannot be collected."""
    # most tests wait for a compiler: where pytest-xdist is there, several run at a time
    cores = os.cpu_count() or 1
    jobs = ["-n", str(max(1, cores - cores // 4))] if find_spec("xdist") and not setting.on_host else []
    words = [*jobs, "-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-m", "gpu"]
    folders = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "metrics" / "test_devices.py")]
    status = pytest.main([*words, "--rootdir", str(ROOT), *folders], plugins=[Rows(setting)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")
