"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, whose kernels a CPU then runs

from filelock import FileLock

from pangu.data.stdlib import StdlibPaths
from tests.library import prepare_library
from tests.spawn import Pool
from tests.threads import Ranks

with suppress(ImportError):  # the tests of an accelerator do without
    from hypothesis import HealthCheck, settings

    # on any machine, however busy; examples share what fixtures make
    settings.register_profile("pangu", deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("pangu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The long forms, which are run before what they test is called done."""
    parser.addoption("--all", action="store_true", help="run what is marked `long` and `all_pairs` too")
    parser.addoption("--kills", type=int, default=3, help="processes or runs that the kill test kills")
    parser.addoption("--seed", type=int, default=0, help="of the series of kills of tests/end_to_end/test_staying.py")
    parser.addoption(
        "--all-pairs", action="store_true", help="continue checkpoints of each layout under each other one"
    )


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be there for the tests of an accelerator
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of what hangs or is killed wait most of their time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms that are not asked for."""
    unwanted = [
        mark
        for mark, option in (("long", "--all"), ("all_pairs", "--all-pairs"))
        if not (config.getoption("--all") or config.getoption(option))
    ]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = _spread([item for item in items if item not in left_out])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave imported objects out of garbage collections, which they outlive, during collection and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The slow tests evenly among the others: no process gets several in a row, and none begins at the end."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    places = [number * len(others) // max(len(slow), 1) for number in range(len(slow) + 1)]
    parts = [others[begin:end] for begin, end in pairwise(places)]
    return [item for one, part in zip(slow, parts, strict=True) for item in (one, *part)] or others


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder that pytest-xdist's processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(scope="session")
def prepared(session_folder: Path) -> StdlibPaths:
    """The real standard library, prepared once for the session. Not to be changed."""
    with FileLock(session_folder / "library.lock"):
        return prepare_library(session_folder / "library")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that live for the whole session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on several ranks that are threads."""
    return Ranks()


@pytest.fixture(autouse=True, scope="session")
def _one_core() -> Iterator[None]:
    """Tests run side by side, and small products are slower on several threads than on one."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda process: {0})  # which the runs of this process ask for theirs
        yield


@pytest.fixture(autouse=True)
def _defaults() -> None:
    """Restore the process-wide choices of runs: the precision of fp32 matmuls, and the level of the log."""
    torch.set_float32_matmul_precision("highest")
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def empty_compiler() -> Iterator[None]:
    """Nothing compiled before, nothing left behind."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches and forecasts of this process go by published formulas, and carry nothing out."""
    from pangu.planning import program, search
    from tests.formulas import FormulaTraces, as_planned

    monkeypatch.setattr(program, "Traces", FormulaTraces)
    monkeypatch.setattr(search, "carried_out", as_planned)
