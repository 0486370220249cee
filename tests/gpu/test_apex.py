"""Kernels of apex compute what torch's do, where apex is installed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_suite.setting import preset
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.layers.apex import USES, missing
from pangu.optim.build import implementation
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import Choices
from pangu.training.step import Trainer

DEVICE = torch.device("cuda", 0)
NARROW = {"precision.compute": "bf16"}
CONFIG = build(RunConfig, preset("tiny", NARROW))
REASONS = [str(problem) for use in USES for problem in missing(use, CONFIG, DEVICE)]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS)),
]


def losses(config: RunConfig, kernels: str) -> list[float]:
    """Losses of four steps in bf16."""
    choices = Choices("sdpa", "highest", "cuda", "bf16", **dict.fromkeys(USES, kernels))
    trainer = Trainer(config, Mesh(Layout(), 0, DEVICE), choices=choices)
    assert (implementation(trainer.optimizer) == "apex's multi-tensor kernels") == (kernels == "apex")
    size, micro = config.batch.global_size, config.batch.micro_size
    stream = open_sources(config.data, config.model, config.train.seed).train
    with Loader(stream, config.data.packing, size, micro, 0, 1) as loader:
        return [trainer.train_step(loader.micro_batches(size * step)).loss for step in range(4)]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_run_with_apex_has_the_losses_of_one_with_torch(norm: str) -> None:
    config = build(RunConfig, preset("tiny", {**NARROW, "model.norm": norm}))
    assert losses(config, "apex") == pytest.approx(losses(config, "torch"), rel=1e-2)  # two units of bf16
