"""Compiled layers on an accelerator: what they are without, in fewer kernels. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._triton import has_triton

from benchmarks.gpu_suite.setting import preset
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.gpu.test_training import option

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("empty_compiler"),
    pytest.mark.skipif(not (torch.accelerator.is_available() and has_triton()), reason="needs a GPU and Triton"),
]
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
DOCUMENTS = {"data.packing.eod": 3, "data.packing.reset_mask": True, "data.packing.reset_positions": True}


def run_of(changes: dict[str, Any], steps: int = 4) -> tuple[list[float], int]:
    """Losses of a few steps on one device, and the kernels of the last one."""
    config = build(RunConfig, preset("tiny", changes))
    trainer = Trainer(config, Mesh(Layout(), 0, choose_device("auto", Launch())))
    stream = open_sources(config.data, config.model, config.train.seed).train
    size, losses = config.batch.global_size, []
    with Loader(stream, config.data.packing, size, config.batch.micro_size, 0, 1) as loader:
        for step in range(steps):
            batches = loader.micro_batches(size * step)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                losses.append(trainer.train_step(batches).loss)
    return losses, sum(event.count for event in profiler.key_averages())


KERNELS = ["reference", "sdpa", "flash", "cudnn", "flex", "triton"]
MORE: dict[str, dict[str, Any]] = {"plain": {}, "dropout": DROPOUT, "documents": DOCUMENTS}
PAIRS = [
    (kernel, ("none", "selective", "full")[(row + column) % 3], more)
    for row, kernel in enumerate(KERNELS)
    for column, more in enumerate(MORE)
]
"""All pairs of a kernel, a recompute and more."""


@pytest.mark.parametrize(("kernel", "recompute", "more"), PAIRS)
def test_losses_are_those_of_layers_that_are_not_compiled(kernel: str, recompute: str, more: str) -> None:
    """Masks included, those that a kernel draws too. 0.05 after 4 updates in bf16: fused kernels round less."""
    changes = {"precision": option("precision", "bf16"), "model.attention": kernel, "memory.recompute": recompute}
    changes |= {"model.heads": 2, **MORE[more]}  # of 16 columns, which all kernels take
    eager, kernels = run_of(changes)
    before = counters["stats"]["unique_graphs"]  # of the loss and of kernels, which are compiled without layers too
    found, fewer = run_of({**changes, "compile": True})
    assert found == pytest.approx(eager, abs=0.05)
    assert fewer < kernels
    # the layers and the query layer; once more where the number of documents may be any
    assert counters["stats"]["unique_graphs"] - before <= (4 if more == "documents" else 2)
