"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.spawn import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--kills=50`: the long form of the kill test."""
    parser.addoption("--kills", type=int, default=5, help="processes or runs that the kill test kills")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that live for the whole session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)
