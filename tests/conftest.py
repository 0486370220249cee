"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.spawn import Pool
from tests.threads import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`, `--kills=50`, `--all-pairs`: long forms, which are run before what they test is called done."""
    parser.addoption("--all", action="store_true", help="run what is marked `long` too")
    parser.addoption("--kills", type=int, default=5, help="processes or runs that the kill test kills")
    parser.addoption(
        "--all-pairs", action="store_true", help="continue checkpoints of each layout under each other one"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--all`, leave out what is marked `long`."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


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
