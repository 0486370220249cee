"""Sequences that ranks share: long ones, any options together, and what goes over the wire."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.data.loader import Loader
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.random import generator
from pangu.training.step import StepResult, Trainer
from tests.configs import tiny
from tests.covering import Case
from tests.parallel.harness import compare, one_process, parallel_keys, train_layout, whole
from tests.parallel.test_layouts import (
    COVER,
    FACTORS,
    FROZEN,
    devices,
    fits,
    keys_of,
    layout_of,
    way_of_collectives,
    way_of_gradients,
)
from tests.threads import Ranks

LONG = 8192
MODEL = (
    f"model.sequence={LONG}",
    "model.positions=rope",
    "model.layers=2",
    "model.attention=sdpa",
    "batch.global_size=1",
    "batch.micro_size=1",
    "optimizer.lr=0.01",
    "lr_schedule.warmup_steps=0",
    "precision=fp64",
    "loss.chunk=2048",
)


class LongTexts:
    """Random tokens."""

    num_samples = None

    def __getitem__(self, index: int) -> Any:
        return generator("long", index).integers(3, 101, size=LONG + 1)


def long_step(rank: int, world: int, layout: Layout, *overrides: str) -> tuple[StepResult, dict[str, Tensor]]:
    """Result and gradients of a step."""
    config = tiny(*MODEL, *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    with Loader(LongTexts(), config.data.packing, 1, 1, trainer.mesh.at.data, layout.data) as loader:
        trainer.forward_backward(loader.micro_batches(0))
    gradients = whole(trainer, of_gradients=True)
    return trainer.read(trainer.update()), gradients


@lru_cache(maxsize=1)
def alone() -> tuple[StepResult, dict[str, Tensor]]:
    return long_step(0, 1, Layout())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(context=4, zero=1), "gather"),
        (Layout(context=4, zero=2), "ring"),
        (Layout(context=2, tensor=2, sequence=True), "ulysses"),
    ],
    ids=str,
)
def test_a_long_sequence_equals_one_process(ranks: Ranks, layout: Layout, kind: str) -> None:
    """8,192 tokens in fp64; 1e-11: sums of as many products in another order, 1.1e-16 each."""
    (result, gradients), (reference, expected) = (
        ranks.run(layout.world, long_step, layout, f"parallel.context_kind={kind}")[0],
        alone(),
    )
    assert result.loss == pytest.approx(reference.loss, rel=1e-12)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-11)
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-4)
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-11 * scale, msg=name)


def random_case(number: int) -> Case:
    """Any values that go together, of ranks that share sequences."""
    chance = random.Random(number)
    while True:
        given = {name: chance.choice(values) for name, values in FACTORS.items() if name.startswith("context")}
        given |= {name: chance.choice(FACTORS[name]) for name in chance.sample(list(FACTORS), 6)}
        if fits(given) and devices(given) > 1 and (case := COVER.complete(given)) is not None:
            return {name: case[name] for name in FACTORS}


@pytest.mark.long
@pytest.mark.parametrize("number", range(100))
def test_any_options_together_equal_one_process(ranks: Ranks, number: int) -> None:
    """As the covering array, to 1e-12."""
    case = random_case(number)
    layout, (model, own) = layout_of(case), keys_of(case)
    one = one_process(2, *model, "precision=fp64")
    patterns = FROZEN[case["frozen"]]
    frozen = {name for name in one["first"] if any(fnmatchcase(name, pattern) for pattern in patterns)}
    with way_of_collectives(case), way_of_gradients(case):
        ours = ranks.run(layout.world, train_layout, layout, 2, *model, "precision=fp64", *own)
    compare(ours[0], one, 1e-12, frozen)
