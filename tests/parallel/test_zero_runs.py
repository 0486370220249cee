"""Skipped steps, loss scale, clipping, trust ratios and checkpoints of sharded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pangu.data.loader import Loader
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import Saver
from pangu.training.step import StepResult, Trainer
from pangu.training.validation import trust_ratios
from tests.configs import tiny
from tests.parallel.harness import parallel_keys, samples_of, whole
from tests.parallel.test_zero import MODEL
from tests.threads import Ranks


def trainer_of(layout: Layout, *overrides: str) -> Trainer:
    return Trainer(tiny(*MODEL, *overrides, *parallel_keys(layout)), Mesh.connect(layout, torch.device("cpu")))


def train(trainer: Trainer, steps: range) -> list[StepResult]:
    """Make steps on the samples that belong to them."""
    config, mesh = trainer.config, trainer.mesh
    size, micro = config.batch.global_size, config.batch.micro_size
    packing = config.data.packing
    with Loader(samples_of(packing), packing, size, micro, mesh.at.data, mesh.layout.data) as loader:
        return [trainer.train_step(loader.micro_batches(size * step)) for step in steps]


def overflow_on_the_last_rank(rank: int, world: int, layout: Layout) -> dict[str, Any]:
    """Three fp16 steps; in the second one gradient of the last rank is infinite."""
    trainer = trainer_of(layout, "precision=fp16", "precision.loss_scale.initial=256")
    results = train(trainer, range(1))
    before = whole(trainer, of_gradients=False)
    # a vector's: that of the words' table passes no hook
    parameter = next(one for flat in trainer.parameters.trained for one, _ in flat.parameters if one.dim() == 1)
    handle = parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf)) if rank == world - 1 else None
    results += train(trainer, range(1, 2))
    after = whole(trainer, of_gradients=False)
    if handle is not None:
        handle.remove()
    results += train(trainer, range(2, 3))
    return {"results": results, "kept": all(torch.equal(before[name], after[name]) for name in before)}


@pytest.mark.parametrize(
    "layout",
    [Layout(data=2), *(Layout(data=2, zero=zero) for zero in (1, 2, 3)), Layout(pipeline=2, data=2, zero=1)],
    ids=str,
)
def test_all_skip_what_one_rank_cannot_use(ranks: Ranks, layout: Layout) -> None:
    for found in ranks.run(layout.world, overflow_on_the_last_rank, layout):
        first, second, third = found["results"]
        assert [result.skipped for result in found["results"]] == [False, True, False]
        assert found["kept"]
        assert [first.loss_scale, second.loss_scale, third.loss_scale] == [256, 256, 128]
        assert third.lr == second.lr > first.lr


def scaled_run(rank: int, world: int, layout: Layout, *overrides: str) -> tuple[list[StepResult], dict[str, Tensor]]:
    trainer = trainer_of(layout, "model.dropout=0", "model.attention_dropout=0", *overrides)
    return train(trainer, range(3)), whole(trainer, of_gradients=False)


@pytest.mark.parametrize("layout", [Layout(data=2, zero=1), Layout(data=2, zero=3), Layout(pipeline=2)], ids=str)
def test_a_growing_scale_does_not_change_the_gradient(ranks: Ranks, layout: Layout) -> None:
    scale = ("precision=fp16", "precision.loss_scale.initial=256")
    grows, stays = (
        ranks.run(2, scaled_run, layout, *scale, f"precision.loss_scale.growth_interval={interval}")[0]
        for interval in (1, 99)
    )
    for step, (mine, other) in enumerate(zip(grows[0], stays[0], strict=True)):
        assert mine.loss_scale == 256 * 2**step
        assert other.loss_scale == 256
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)


@pytest.mark.parametrize("layout", [Layout(data=2, zero=1), Layout(data=2, zero=3), Layout(pipeline=2)], ids=str)
def test_clipping_binds_alike(ranks: Ranks, layout: Layout) -> None:
    clip = ("optimizer.clip=0.01", "precision=fp64")
    results, weights = ranks.run(2, scaled_run, layout, *clip)[0]
    alone, expected = scaled_run(0, 1, Layout(), *clip)
    for mine, other in zip(results, alone, strict=True):
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
        assert mine.grad_norm > 0.01
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10, msg=name)


def ratios(rank: int, world: int, layout: Layout, optimizer: str) -> dict[str, float]:
    trainer = trainer_of(layout, "precision=fp64", f"optimizer={optimizer}")
    train(trainer, range(1))
    return trust_ratios(trainer)


@pytest.mark.parametrize("layout", [Layout(data=2, zero=3), Layout(pipeline=2), Layout(tensor=2)], ids=str)
def test_every_rank_knows_all_trust_ratios(ranks: Ranks, layout: Layout) -> None:
    expected = ratios(0, 1, Layout(), "lamb")
    assert {"layers.0.attention.query.weight", "layers.0.attention.key.weight", "embedding.word.weight"} <= set(
        expected
    )
    assert not any(name.endswith("bias") for name in expected)
    for found in ranks.run(2, ratios, layout, "lamb"):
        assert found == pytest.approx(expected, rel=1e-10)
    assert ratios(0, 1, Layout(), "adam") == {}


class Steps(NamedTuple):
    """Weights, the loss of the step that follows, and the weights after it."""

    first: dict[str, Tensor]
    loss: float
    second: dict[str, Tensor]


def two_states(trainer: Trainer, step: int) -> Steps:
    """Make a step."""
    first = whole(trainer, of_gradients=False)
    (result,) = train(trainer, range(step, step + 1))
    return Steps(first, result.loss, whole(trainer, of_gradients=False))


def save(rank: int, world: int, layout: Layout, folder: str, steps: int, *overrides: str) -> Steps:
    """Some steps and a checkpoint, then one more step."""
    trainer = trainer_of(layout, f"train.output={folder}", "checkpoint.asynchronous=false", *overrides)
    train(trainer, range(steps))
    with Saver(trainer.config, trainer) as saver:
        saver.save(steps * trainer.config.batch.global_size, {})
    return two_states(trainer, steps)


def resume(rank: int, world: int, layout: Layout, folder: str, *overrides: str) -> dict[str, Tensor]:
    """The third step alone."""
    trainer = trainer_of(layout, f"train.output={folder}", *overrides)
    assert load_checkpoint(Path(folder) / "checkpoints" / "step-00000002", trainer.config, trainer)["samples"] == 8
    train(trainer, range(2, 3))
    return whole(trainer, of_gradients=False)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(data=2, zero=3), ("precision=bf16",)),
        (Layout(data=2, zero=2), ("precision=bf16", "optimizer.moments=bf16", "memory.offload=[optimizer]")),
        (Layout(pipeline=2, data=2, zero=1), ("train.frozen=[layers.1.*]", "precision=bf16", "optimizer=lamb")),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, layout: Layout, overrides: tuple[str, ...]
) -> None:
    unbroken = ranks.run(layout.world, save, layout, str(tmp_path), 2, *overrides)[0].second
    resumed = ranks.run(layout.world, resume, layout, str(tmp_path), *overrides)[0]
    assert all(torch.equal(resumed[name], weight) for name, weight in unbroken.items())
