"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.spawn import Pool
from tests.threads import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """The long forms, which are run before what they test is called done."""
    parser.addoption("--all", action="store_true", help="run what is marked `long` and `all_pairs` too")
    parser.addoption("--kills", type=int, default=3, help="processes or runs that the kill test kills")
    parser.addoption(
        "--all-pairs", action="store_true", help="continue checkpoints of each layout under each other one"
    )


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
    items[:] = [item for item in items if item not in left_out]


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
def _usual_products() -> None:
    """A run of this process chooses how fp32 products are made, for all that follows."""
    torch.set_float32_matmul_precision("highest")
