"""Long sequences that ranks share; `test_layouts.py` has short ones under every other option."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.data.loader import Loader
from pangu.data.stream import Stream
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.random import generator
from pangu.training.step import StepResult, Trainer
from tests.configs import tiny
from tests.parallel.harness import parallel_keys, whole
from tests.threads import Ranks

MODEL = (
    "model.positions=rope",
    "model.layers=2",
    "model.attention=sdpa",
    "batch.global_size=1",
    "batch.micro_size=1",
    "optimizer.lr=0.01",
    "lr_schedule.warmup_steps=0",
    "precision=fp64",
    "loss.chunk=1024",
)


class LongTexts(Stream):
    """Random tokens."""

    num_samples = None

    def __init__(self, length: int) -> None:
        self._length = length

    def __getitem__(self, index: int) -> Any:
        return generator("long", index).integers(3, 101, size=self._length + 1)


def long_step(
    rank: int, world: int, layout: Layout, length: int, *overrides: str
) -> tuple[StepResult, dict[str, Tensor]]:
    """Result and gradients of a step."""
    config = tiny(*MODEL, f"model.sequence={length}", *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    with Loader(LongTexts(length), config.data.packing, 1, 1, trainer.mesh.at.data, layout.data) as loader:
        trainer.forward_backward(loader.micro_batches(0))
    gradients = whole(trainer, of_gradients=True)
    return trainer.read(trainer.update()), gradients


@lru_cache(maxsize=1)
def alone(length: int) -> tuple[StepResult, dict[str, Tensor]]:
    return long_step(0, 1, Layout(), length)


@pytest.mark.parametrize("length", [4096, pytest.param(8192, marks=[pytest.mark.long, pytest.mark.slow])])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(context=4, zero=1), "gather"),
        (Layout(context=4, zero=2), "ring"),
        (Layout(context=2, tensor=2, sequence=True), "ulysses"),
    ],
    ids=str,
)
def test_a_long_sequence_equals_one_process(ranks: Ranks, layout: Layout, kind: str, length: int) -> None:
    """In fp64; 1e-11: sums of as many products in another order, 1.1e-16 each."""
    (result, gradients), (reference, expected) = (
        ranks.run(layout.world, long_step, layout, length, f"parallel.context_kind={kind}")[0],
        alone(length),
    )
    assert result.loss == pytest.approx(reference.loss, rel=1e-12)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-11)
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-4)
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11 * scale, msg=name)
