"""Old names of keys, on the command line, in a run folder's configuration, and in what a planner may not change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pangu.config.build import RENAMED, build
from pangu.config.schema import RunConfig
from pangu.pipeline.layouts import choose_layout
from pangu.training.command import compose, given_keys
from tests.spawn import repository

VALUES = {
    "parallel.allowed": "[{tensor: 2}, {}]",
    "parallel.virtual": "2",
    "precision.fp32_products": "highest",
    "data.later_weights": "[{sample: 8, weights: [1.0]}]",
    "faults.slow_every": "7",
    "faults.slow_factor": "3.5",
}
INDEXED = ("data=indexed", "data.train=[a]", "data.validation=[]", "validation.every=0", "data.weights=[1.0]")
OLD, NEW = "faults.slow_every", "faults.straggler_every"


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
    (group, key), new = old.split("."), RENAMED[old]
    expected = composed(f"{new}={VALUES[old]}")
    assert expected != composed()
    for words in (f"{old}={VALUES[old]}", f"+{old}={VALUES[old]}", f"{group}={{{key}: {VALUES[old]}}}"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pangu"):
            assert composed(words) == expected
            assert build(RunConfig, stored(expected, old)) == build(RunConfig, expected)
        assert caplog.messages == [f"{old} is deprecated; set {new} instead"]
        assert given_keys([words]) == {new}


def test_other_ranks_do_not_warn(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING, "pangu"):
        assert composed(f"{OLD}=7")["faults"]["straggler_every"] == 7
    assert not caplog.messages


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((f"{OLD}=3", f"{NEW}=5"), 5),
        ((f"{NEW}=5", f"{OLD}=3"), 3),
        ((f"{NEW}=5", "faults={slow_every: 3}"), 3),
        (("faults={slow_every: 3}", f"++{NEW}=5"), 5),
        ((f"{NEW}=4", f"{OLD}=4"), 4),
    ],
)
def test_the_later_of_both_names_counts(words: tuple[str, ...], value: int) -> None:
    assert composed(*words)["faults"]["straggler_every"] == value


def test_the_command_line_wins_over_an_old_name_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\nfaults:\n  slow_every: 3\n")
    recipe = ("+mine@_global_=mine", f"hydra.searchpath=[file://{tmp_path.parent}]")
    (tmp_path.parent / "mine").symlink_to(tmp_path)
    assert composed(*recipe)["faults"]["straggler_every"] == 3
    assert composed(*recipe, f"{NEW}=5")["faults"]["straggler_every"] == 5


def test_old_names_in_a_list_of_layouts(caplog: pytest.LogCaptureFixture) -> None:
    words = ("parallel.schedule=interleaved", "model.layers=4", "batch.global_size=4", "batch.micro_size=1")
    with caplog.at_level(logging.WARNING, "pangu"):
        values = composed(*words, "parallel.layouts=[{pipeline: 2, virtual: 2}]")
    assert caplog.messages == ["parallel.virtual is deprecated; set parallel.virtual_stages instead"]
    assert choose_layout(values, 2).layout.virtual_stages == 2
