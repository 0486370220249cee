"""Old names of keys, on the command line, in a run folder's configuration, and in what a planner may not change."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pangu.config import renamed
from pangu.config.build import build
from pangu.config.renamed import RENAMED
from pangu.config.schema import RunConfig
from pangu.training.command import compose, given_keys
from tests.spawn import repository

VALUES = {
    "parallel.allowed": "[{tensor: 2}, {}]",
    "precision.fp32_products": "highest",
    "data.later_weights": "[{sample: 8, weights: [1.0]}]",
    "faults.slow_every": "7",
    "faults.slow_factor": "3.5",
}
INDEXED = ("data=indexed", "data.train=[a]", "data.validation=[]", "validation.every=0", "data.weights=[1.0]")


def composed(*words: str) -> dict[str, Any]:
    """The configuration of a command line."""
    return compose(repository() / "configs", ("model=pangu_quickstart", *INDEXED, *words))


def stored(values: dict[str, Any], old: str) -> dict[str, Any]:
    """A configuration as an older version has written it."""
    (group, key), new = old.split("."), RENAMED[old].rpartition(".")[2]
    keys = {name: value for name, value in values[group].items() if name != new}
    return {**values, group: {**keys, key: values[group][new]}}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_means_the_new_one_and_is_named_once(old: str, caplog: pytest.LogCaptureFixture) -> None:
    new = RENAMED[old]
    renamed._warn.cache_clear()
    expected = composed(f"{new}={VALUES[old]}")
    with caplog.at_level(logging.WARNING, "pangu"):
        assert composed(f"{old}={VALUES[old]}") == expected
        assert build(RunConfig, stored(expected, old)) == build(RunConfig, expected)
    assert caplog.messages == [f"{old} is deprecated; set {new} instead"]
    assert given_keys([f"{old}={VALUES[old]}"]) == {new}
    assert expected != composed()
