"""Stages of growing batches and sequences compute the same on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.data.loader import Loader
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.stages import BatchStages
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, parallel_keys, samples_of, whole
from tests.threads import Ranks

MODEL = (
    *(*OVERRIDES, "precision=fp64", "model.hidden=48", "model.heads=12", "model.ffn=96", "model.layers=5"),
    *("batch.global_size=24", "batch.micro_size=1", "train.check_step=true", "train.steps=5"),
    "batch.stages=[{until:1,global_size:8,sequence:4},{until:2,global_size:12,sequence:8},{until:3,global_size:12}]",
)
LAYOUTS = {
    "tensor_zero_2": (Layout(2, 1, 2, 2, sequence=True), ()),
    "interleaved": (Layout(1, 2, 2, 1, virtual_stages=2), ("parallel.schedule=interleaved",)),
    "zero_bubble_v": (Layout(1, 2, 1, 0, virtual_stages=2), ("parallel.schedule=zb_v",)),
    "context": (Layout(1, 2, 1, 3, context=2), ()),
    "experts": (Layout(1, 1, 4, 1, expert=2), ("model.experts=4", "model.expert_ffn=24")),
    "recompute": (Layout(data=2, zero=3), ("memory.recompute=full", "memory.offload=[activations,optimizer]")),
}


def run(rank: int, world: int, layout: Layout, *overrides: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of five steps, through four stages, and the weights after them."""
    config = tiny(*overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu"), config.parallel.timeout_s))
    stages, at, batch, packing = BatchStages(config), trainer.mesh.at, config.batch, config.data.packing
    samples, figures = 0, []
    sizes: Any = (batch.global_size, batch.micro_size, at.data, layout.data)
    with Loader(samples_of(packing), packing, *sizes, stage_at=stages.loader_stage_at) as loader:
        for step in range(5):
            stages.enter(trainer)
            result = trainer.train_step(loader.micro_batches(samples, step))
            samples += stages.loader_stage_at(step).global_size // stages.loader_stage_at(step).parts
            figures += [result.loss, result.grad_norm]
    assert samples == 2 + 6 + 12 + 24 + 24
    return figures, whole(trainer, of_gradients=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_are_the_same_on_every_layout(ranks: Ranks, name: str) -> None:
    """1e-10 after five steps: sums of at most 96 products in another order, 1.1e-16 each, divided by second moments."""
    layout, own = LAYOUTS[name]
    model = tuple(word for word in own if word.startswith("model."))
    figures, weights = ranks.run(layout.world, run, layout, *MODEL, *own)[0]
    expected, reference = run(0, 1, Layout(), *MODEL, *model)
    assert figures == pytest.approx(expected, rel=1e-10)
    for tensor, one in reference.items():
        torch.testing.assert_close(weights[tensor], one, rtol=1e-8, atol=1e-10, msg=tensor)
