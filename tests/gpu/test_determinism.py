"""`train.deterministic` on an accelerator, bit for bit. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite.setting import preset
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.evaluation.generation import Sampling, pick
from pangu.layers.gpu_kernels import can_run
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.determinism import deterministic
from pangu.training.step import Trainer
from tests.gpu.test_training import option

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LONG = {"model.sequence": 512, "model.hidden": 128, "model.heads": 2, "model.vocab": 64, "train.deterministic": True}
"""Several blocks of keys add to the same gradient of a query, and thousands of tokens to that of a word."""


def weights_after(changes: dict[str, Any]) -> str:
    """A digest of all weights after a few steps."""
    config = build(RunConfig, preset("tiny", LONG | changes))
    trainer = Trainer(config, Mesh(Layout(), 0, choose_device("cuda", Launch())))
    stream, size = open_sources(config.data, config.model, config.train.seed).train, config.batch.global_size
    with Loader(stream, config.data.packing, size, config.batch.micro_size, 0, 1) as loader:
        for step in range(4):
            trainer.train_step(loader.micro_batches(size * step))
    digest = hashlib.sha256()
    for shard in trainer.parameters.shards:
        digest.update(shard.main.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.dropout": 0.1, "model.attention_dropout": 0.1},
        {"data.packing.reset_mask": True, "data.packing.eod": 3},
        {"model.positions": "relative"},
        {"model.positions": "alibi", "model.window": 100},
        {"optimizer": option("optimizer", "lamb")},
    ],
    ids=str,
)
def test_two_runs_give_the_same_bits(precision: str, changes: dict[str, Any]) -> None:
    """torch raises an error at an operator that has no such kernel."""
    with deterministic():
        first, second = (weights_after(changes | {"precision": option("precision", precision)}) for _ in range(2))
    assert first == second


@pytest.mark.skipif(not can_run("flash", torch.device("cuda")), reason="needs torch's flash attention")
def test_flash_attention_over_documents_gives_the_same_bits() -> None:
    changes = {"model.attention": "flash", "precision": option("precision", "bf16")}
    changes |= {"data.packing.reset_mask": True, "data.packing.eod": 3}
    with deterministic():
        assert weights_after(changes) == weights_after(changes)


def test_text_is_drawn() -> None:
    """A GPU's running totals of floating numbers are refused."""
    scores, chances = torch.randn(3, 1000, device="cuda"), torch.rand(3, dtype=torch.float64, device="cuda")
    with deterministic():
        ids = pick(scores, torch.zeros_like(scores, dtype=torch.bool), chances, Sampling(1, top_p=0.9))
    assert ids.device == scores.device
    assert ids.shape == (3,)
