"""Number formats: master weights, accumulation, loss scale."""

from __future__ import annotations

import pytest
import torch

from pangu.data.batch import Batch
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.configs import tiny

QUIET = ("model.dropout=0", "model.attention_dropout=0", "lr_schedule.warmup_steps=0")


def trainer_of(*overrides: str) -> Trainer:
    config = tiny(*QUIET, *overrides)
    return Trainer(config, Mesh(Layout(), 0, torch.device("cpu")))


def batches(trainer: Trainer, step: int) -> list[Batch]:
    config = trainer.config
    sources = open_sources(config.data, config.model, config.train.seed)
    with Loader(sources.train, config.data.packing, config.batch.global_size, config.batch.micro_size, 0, 1) as loader:
        return loader.micro_batches(config.batch.global_size * step)


def updates(trainer: Trainer) -> set[int]:
    """How often the optimizer has updated its tensors."""
    return {int(state["step"]) for state in trainer.optimizer.state.values()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_weights_are_the_rounded_masters(precision: str) -> None:
    trainer = trainer_of(f"precision={precision}")
    for step in range(3):
        trainer.train_step(batches(trainer, step))
    for unit in trainer.parameters.flat_parameters:
        assert unit.main.dtype == unit.grad.dtype == torch.float32
        assert unit.weights.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert torch.equal(unit.weights, unit.main.to(unit.weights.dtype))
        assert not torch.equal(unit.weights.float(), unit.main)
        for parameter, _ in unit.parameters:
            assert parameter.data_ptr() >= unit.weights.data_ptr()  # a view of the unit's buffer, not a copy
            assert parameter.grad is None


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_16_bit_training_stays_near_fp32(precision: str, tolerance: float) -> None:
    """8 steps on a repeated batch; tolerance: a few roundings of 2^-9 (bf16) or 2^-12 (fp16) of a loss of 4.6."""
    wide, narrow = trainer_of("optimizer.lr=0.01"), trainer_of(f"precision={precision}", "optimizer.lr=0.01")
    losses = []
    for _ in range(8):
        results = [trainer.train_step(batches(trainer, 0)) for trainer in (wide, narrow)]
        assert results[1].loss == pytest.approx(results[0].loss, abs=tolerance * 4.6)
        assert not results[1].skipped
        losses.append(results[1].loss)
    assert losses[-1] < losses[0] - 0.3


def test_many_small_gradients_are_summed_in_fp32() -> None:
    """In bf16, 1 + 2^-9 is 1: sixteen micro-batches must not lose their small parts."""
    narrow = trainer_of("precision=bf16", "batch.micro_size=1", "batch.global_size=16", "optimizer.clip=null")
    wide = trainer_of("batch.micro_size=1", "batch.global_size=16", "optimizer.clip=null")
    narrow.train_step(batches(narrow, 0))
    wide.train_step(batches(wide, 0))
    ours = torch.cat([unit.grad for unit in narrow.parameters.flat_parameters])
    exact = torch.cat([unit.grad for unit in wide.parameters.flat_parameters])
    # one bf16 gradient has a relative error of about 2^-8; summing in bf16 would add up to 16 of them
    assert float((ours - exact).norm() / exact.norm()) < 2**-7


def test_an_overflow_skips_the_step_and_keeps_the_rate() -> None:
    trainer = trainer_of(
        "precision=fp16",
        "precision.loss_scale.initial=1e30",
        "precision.loss_scale.growth_interval=2",
        "lr_schedule.warmup_steps=10",
    )
    before = [unit.main.clone() for unit in trainer.parameters.flat_parameters]
    first = trainer.train_step(batches(trainer, 0))
    assert first.skipped
    assert trainer.skipped == 1
    assert trainer.loss_scale.scale == 5e29
    assert all(
        torch.equal(unit.main, old) for unit, old in zip(trainer.parameters.flat_parameters, before, strict=True)
    )
    assert updates(trainer) == {0}
    second = trainer.train_step(batches(trainer, 1))
    assert second.lr == first.lr  # a skipped step is no update


@pytest.mark.parametrize("optimizer", ["adam", "lamb", "muon"])
def test_weight_decay_follows_its_schedule_with_biases_and_norms_left_out(optimizer: str) -> None:
    words = (f"optimizer={optimizer}", "optimizer.weight_decay=0.4", "train.steps=4")
    trainer = trainer_of(*words, "weight_decay_schedule={start:0,shape:linear}")
    seen = []
    for step in range(3):
        trainer.train_step(batches(trainer, step))
        seen.append({round(group["weight_decay"], 12) for group in trainer.optimizer.param_groups})
    assert seen == [{0.0}, {0.0, 0.1}, {0.0, 0.2}]
    bare = [group for group in trainer.optimizer.param_groups if group["weight_decay"] == 0.0]
    vectors = {s.placement.name for s in trainer.parameters.trained_shards if s.placement.is_vector}
    of = {s.main: s.placement.name for s in trainer.parameters.trained_shards}
    assert {of[tensor] for group in bare for tensor in group["params"]} == vectors


def test_the_growth_step_does_not_change_the_gradient() -> None:
    """The scale is doubled after the update, so a run that doubles equals one that does not."""
    grows = trainer_of("precision=fp16", "precision.loss_scale.initial=256", "precision.loss_scale.growth_interval=1")
    stays = trainer_of("precision=fp16", "precision.loss_scale.initial=256", "precision.loss_scale.growth_interval=99")
    for step in range(3):
        a, b = grows.train_step(batches(grows, step)), stays.train_step(batches(stays, step))
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-2)
        assert a.loss_scale == 256 * 2**step
        assert b.loss_scale == 256
    for one, other in zip(grows.parameters.flat_parameters, stays.parameters.flat_parameters, strict=True):
        assert float((one.main - other.main).abs().max()) < 1e-3


def test_clipping_binds_and_reports_the_norm_before_it() -> None:
    free, bound = trainer_of("optimizer.clip=null"), trainer_of("optimizer.clip=0.01")
    a, b = free.train_step(batches(free, 0)), bound.train_step(batches(bound, 0))
    assert a.grad_norm == b.grad_norm > 0.01
    for one, other in zip(free.parameters.flat_parameters, bound.parameters.flat_parameters, strict=True):
        torch.testing.assert_close(other.grad, one.grad * (0.01 / a.grad_norm), rtol=1e-3, atol=1e-9)


def test_a_loss_that_is_not_finite_skips_the_step_in_every_format() -> None:
    trainer = trainer_of()
    batch = batches(trainer, 0)
    with torch.no_grad():
        trainer.parameters.flat_parameters[0].main[0] = torch.inf
    result = trainer.train_step(batch)
    assert result.skipped
    assert updates(trainer) == {0}


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_fp64_clips_in_fp64(optimizer: str) -> None:
    """A first moment of (1 - beta) times the clipped gradient; a factor rounded to fp32 is off by up to 6e-8."""
    trainer = trainer_of("precision=fp64", f"optimizer={optimizer}", "optimizer.clip=0.01", "optimizer.betas=[0.5,0.9]")
    result = trainer.train_step(batches(trainer, 0))
    moments = [state["exp_avg"].norm() for state in trainer.optimizer.state.values()]
    clipped = 0.01 * result.grad_norm / (result.grad_norm + 1e-6)
    assert float(torch.stack(moments).norm()) / 0.5 == pytest.approx(clipped, rel=1e-14)
