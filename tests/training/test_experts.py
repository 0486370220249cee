"""A run with experts: what it records, how it goes on, and what is made of its weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.checkpoint.index import read_index
from pangu.common.errors import UserError
from pangu.interop.loading import load_model
from pangu.layers.expert_balance import ExpertBalance
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SMALL
from tests.models.helpers import variant
from tools.convert_checkpoint import main as convert

EXPERTS = (
    *("model.experts=4", "model.expert_ffn=16", "model.expert_capacity=0.5", "model.router.bias_rate=0.01"),
    *("data=synthetic", "model.vocab=64", "validation.every=0", "train.device=cpu", "lr_schedule.warmup_steps=1"),
    *("metrics.wandb=off", "metrics.tensorboard=false"),
    # what `auto` times may choose another kernel in each of two runs
    *("model.attention=reference", "precision.fp32_matmul=highest"),
)


def lines(output: Path) -> list[dict[str, Any]]:
    """The records of a run, without what depends on the time."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: record[name] for name in ("step", "loss", "grad_norm", "experts")} for record in records]


@pytest.mark.parametrize("balance", ["bias", "global"])
def test_a_run_records_loads_and_goes_on_as_if_it_had_not_stopped(balance: str, tmp_path: Path) -> None:
    """To the last bit; evaluation chooses with the biases that training left, and a conversion takes them along."""

    def go(name: str, steps: int, *more: str) -> Path:
        words = (*SMALL, *EXPERTS, f"model.router.balance={balance}", "checkpoint.every=2", *more)
        run(composed(*words, f"train.steps={steps}", "lr_schedule.decay_steps=4", f"train.output={tmp_path / name}"))
        return tmp_path / name

    whole, parts = go("whole", 4), go("parts", 2)
    go("parts", 4)
    assert lines(parts) == lines(whole)
    last = lines(whole)[-1]["experts"]
    assert last["load"] > 1 > last["least_load"] >= 0
    assert 0 < last["dropped"] < 0.6
    assert last["balance_loss"] > 0
    states = [read_index(path / "checkpoints" / "step-00000004")["experts"] for path in (whole, parts)]
    assert states[0] == states[1]
    assert (max(map(max, states[0]["bias"])) > 0) == (balance == "bias")
    with pytest.raises(UserError, match=r"\n  model\.router\.score = sigmoid: the checkpoint has softmax$"):
        go("whole", 5, "model.router.score=sigmoid")
    mesh = Mesh.connect(Layout(), torch.device("cpu"))
    loaded = load_model(whole, mesh).runner.model.balance_on(mesh.device)
    assert loaded is not None
    assert loaded.state() == states[0]
    words = ("--from", "pangu", "--to", "pangu", "--input", str(whole), "--output")
    assert convert([*words, str(tmp_path / "converted")]) == 0
    assert read_index(tmp_path / "converted" / "checkpoints" / "step-00000000")["experts"] == states[0]
    assert convert([*words, str(tmp_path / "other"), "model.router.balance=none"]) == (2 if balance == "bias" else 0)


def test_a_state_of_other_experts_is_refused() -> None:
    balance = ExpertBalance(variant(experts=4))
    right = balance.state()
    wrong = [
        {"bias": [[1]]},
        {"bias": {}},
        {"shares": [[math.inf] * 4] * 2},
        {"bias": [[1e39] * 4] * 2},
        {"bias": [[10**400] * 4] * 2},
    ]
    for state in (None, {}, {"layers": [0]}, {**right, "layers": [1, 2]}, *({**right, **change} for change in wrong)):
        with pytest.raises(UserError, match=r"^there: has no valid balancing state for the experts of layers \[0, 1\]"):
            balance.restore("there", state)
