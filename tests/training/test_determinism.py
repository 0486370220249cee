"""`train.deterministic`: what is set for the time of a run, and that nothing is left to timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.common.errors import UserError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import autotune
from pangu.training.autotune import choose
from pangu.training.determinism import deterministic
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.training.test_autotune import table, two_kernels
from tests.training.test_resume import train


def test_libraries_are_told_before_they_are_asked() -> None:
    environment: dict[str, str] = {}
    memory: Any = torch.utils.deterministic
    before = memory.fill_uninitialized_memory
    with deterministic(environment):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention's backward counts on that
        assert not memory.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert memory.fill_uninitialized_memory == before
    told = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "HCCL_DETERMINISTIC": "true"}
    assert environment == told


def test_what_the_user_told_them_stays() -> None:
    told = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_NVLS_ENABLE": "0", "HCCL_DETERMINISTIC": "strict"}
    with deterministic(environment := dict(told)):
        assert environment == told


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
        ("NCCL_NVLS_ENABLE", "2", "0"),
        ("HCCL_DETERMINISTIC", "false", "true or strict"),
    ],
)
def test_what_lets_sums_differ_is_refused(name: str, value: str, works: str) -> None:
    expected = f"train.deterministic = true: with {name} = {value} sums differ .*; set {name}={works}, or"
    with pytest.raises(UserError, match=expected), deterministic({name: value}):
        pass


def test_auto_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fastest is may change from start to start; so may what a run that timed has put into its checkpoint."""
    monkeypatch.setattr(autotune, "kernels_of", two_kernels)
    one = Mesh(Layout(), 0, torch.device("cpu"))
    seconds = {"sdpa": 2.0, "reference": 1.0}
    timed = choose(tiny("model.layers=1"), one, timer=table(seconds))
    assert timed.attention == "reference"
    asked: list[object] = []
    given = tiny("model.layers=1", "train.deterministic=true")
    fixed = choose(given, one, recorded=vars(timed), timer=table(seconds, asked))
    assert (fixed.attention, asked) == ("sdpa", [])


def test_a_run_says_it_and_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []
    original = Trainer.forward_backward

    def noting(*arguments: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        original(*arguments)

    monkeypatch.setattr(Trainer, "forward_backward", noting)
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NCCL_NVLS_ENABLE", "0")):
        monkeypatch.setenv(name, value)  # and gone after the test
    train(tmp_path, 1, "train.deterministic=true", "checkpoint.every=0")
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert json.loads((tmp_path / "summary.json").read_text())["deterministic"] is True
    assert "\ndeterminism  bitwise reproducible" in capsys.readouterr().err
