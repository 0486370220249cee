"""`pretrain.py --help` explains every key, without importing what is heavy."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from pangu.common.errors import UserError
from pangu.config.build import keys_of
from pangu.config.help import explain, overview, reference, show_help
from pangu.config.schema import RunConfig
from tests.spawn import repository


def test_help_is_there_at_once() -> None:
    """CPU time of the process: other work on the machine does not count. torch alone takes longer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(repository() / "pretrain.py"), "--help", "model.window"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.startswith("model.window: an integer or null; at least 1 and at most 2147483647\n    Sliding")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_every_key_is_explained() -> None:
    text = explain("all")
    for key in keys_of(RunConfig):
        assert f"\n{key}: " in text, key
    assert "optimizer.max_ratio: a number or null; above 0 [optimizer.name = lamb]\n    Largest layer-wise" in text


def test_the_reference_has_a_row_for_every_key() -> None:
    """With its dotted name, type, default and meaning."""
    text = reference({"model.window": None, "optimizer.lr": 0.0003})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    names = {row[0].strip("| `") for row in rows}
    assert {name for name in names if "[]" not in name} == set(keys_of(RunConfig))
    assert {"parameter_groups[].lr_multiplier", "batch.stages[].until"} <= names
    assert {len(row) for row in rows} == {4}
    assert all(row[1] and row[3].strip("| ") for row in rows)
    assert "| `model.window` | an integer or null; at least 1 and at most 2147483647 | `null` | Sliding" in text
    assert "| `optimizer.lr` | a number; above 0 | `0.0003` | " in text
    assert "| `optimizer.max_ratio` | a number or null; above 0 |  | With `optimizer.name = lamb`: Largest" in text


@pytest.mark.parametrize(
    "name", ["parameter_groups", "parameter_groups[1]", "parameter_groups[].weight_decay_multiplier"]
)
def test_the_keys_of_a_list_are_explained(name: str) -> None:
    text = explain(name)
    assert "parameter_groups[].weight_decay_multiplier: a number; at least 0\n    Factor on the weight decay." in text
    assert ("parameter_groups[].names: a list of strings" in text) == ("weight" not in name)
    assert "train.steps" not in text


def test_a_key_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_help(["model.window=3", "--help"], repository() / "configs")
    assert capsys.readouterr().out.startswith("model.window: an integer or null")
    with pytest.raises(SystemExit, match="2"):
        show_help(["--help", "model.wandow=3"], repository() / "configs")
    said = capsys.readouterr().err
    assert said.endswith(": error: model.wandow: unknown group or key; did you mean model.window?\n")
    with pytest.raises(UserError, match=r"xyz: unknown group or key; use one of model, parallel, "):
        explain("xyz")


def test_without_words_a_command_says_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        show_help([], repository() / "configs")
    said = capsys.readouterr()
    assert said.out == ""
    assert ": error: no configuration given. To start:\n" in said.err
    assert "  python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart\n" in said.err


def test_the_overview_names_every_group_and_option() -> None:
    text = overview(repository() / "configs")
    for path in (repository() / "configs").glob("*/*.yaml"):
        assert path.stem in text
    assert all(f"\n  {name}" in text for name in ("model", "faults", "dry_run"))
    assert max(map(len, text.splitlines())) <= 120
