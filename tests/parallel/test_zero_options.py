"""What can be added to ZeRO: state on the host, frozen tensors, narrow moments and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pangu.common.errors import ConfigError
from pangu.models.language_model import build_model
from pangu.models.parameters import count_frozen
from pangu.topology.layout import Layout
from pangu.training.step import Trainer
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import Sharding
from pangu.zero.stage_parameters import FlatSpec
from tests.configs import tiny
from tests.parallel import harness
from tests.parallel.cases import FROZEN
from tests.parallel.harness import OVERRIDES, small_trainer, train_layout
from tests.parallel.test_zero import MODEL, same_bits
from tests.threads import Ranks, replaced_here


@pytest.mark.parametrize(
    ("layout", "precision", "host"),
    [
        (Layout(), "fp32", "optimizer"),
        (Layout(data=2), "bf16", "optimizer"),
        (Layout(data=2, zero=2), "fp32", "optimizer"),
        (Layout(data=2, zero=2), "bf16", "optimizer"),
        (Layout(data=2, zero=3), "fp32", "optimizer"),
        (Layout(data=2, zero=3), "bf16", "parameters"),
        (Layout(data=2, zero=3), "bf16", "optimizer,parameters"),
        (Layout(tensor=2, zero=3), "fp32", "optimizer,parameters"),
        (Layout(pipeline=2, zero=3), "fp32", "parameters"),
    ],
    ids=str,
)
def test_what_lies_on_the_host_changes_no_bit(ranks: Ranks, layout: Layout, precision: str, host: str) -> None:
    """LAMB, whose norms are taken of what lies there too."""
    overrides = (*MODEL, f"precision={precision}", "optimizer=lamb")
    here, away = (
        ranks.run(layout.world, train_layout, layout, 2, *overrides, f"memory.offload=[{offload}]")[0]
        for offload in ("", host)
    )
    same_bits(away, here)


def test_an_update_on_the_host_is_fused_whatever_the_device_of_gradients() -> None:
    """As for an Ascend device, whose own fused AdamW cannot skip a step."""
    trainer, _ = small_trainer(Layout(), *MODEL, "memory.offload=[optimizer]")
    parameters, optimizer, steps = trainer.parameters, trainer.optimizer, []
    for flat in parameters.trained:
        flat.grad.fill_(torch.inf)
    before = [flat.main.clone() for flat in parameters.trained]
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    norm = torch.empty((), device="meta")  # has no value for the host to read
    parameters.update(optimizer, norm, torch.tensor(True), torch.ones(()), clip=None)
    assert len(steps) == len(parameters.trained) > 1
    for flat, main in zip(parameters.trained, before, strict=True):
        assert torch.equal(flat.main, main)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_every_unit_is_released(ranks: Ranks, kind: str, frozen: str) -> None:
    """After 3 steps no weights are whole but, of those that are used first, what the last update sent."""
    overrides = (*MODEL, f"model.kind={kind}", f"train.frozen=[{','.join(FROZEN[frozen])}]")
    for held in ranks.run(2, whole_units, Layout(data=2, zero=3), *overrides):
        assert held == [(0, 0)] * 3


def whole_units(rank: int, world: int, layout: Layout, *overrides: str) -> list[tuple[int, int]]:
    """After each step, the number of units that are whole and of gathers on their way."""
    found: list[tuple[int, int]] = []
    from pangu.training.step import Trainer

    update = Trainer.update

    def looked_at(trainer: Trainer) -> Any:
        weights = trainer.parameters.unsharder
        found.append((len(weights.unsharded), len(weights.in_flight)))
        return update(trainer)

    with replaced_here(Trainer, update=looked_at):
        train_layout(rank, world, layout, 3, *overrides)
    return found


def frozen_problems(*patterns: str) -> str:
    with pytest.raises(ConfigError) as caught:
        count_frozen(tiny().model, patterns)
    return str(caught.value)


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    text = frozen_problems("layers.9.*", "layers.0.attention.query.weight")
    assert "train.frozen = layers.9.*: matches no tensor in the model" in text
    assert (
        "freezes layers.0.attention.query.weight but not layers.0.attention.key.weight, layers.0.attention.value.weight"
    ) in text
    assert "freezes all parameters" in frozen_problems("*")
    assert count_frozen(tiny().model, ("*.bias",)) > 0


class Skipped(nn.Module):
    """A layer that some ranks do not use."""

    def forward(self, carried: Any, *_: Any) -> Any:
        """What came in."""
        return carried


def train_without_a_layer(rank: int, world: int, layout: Layout, absent: bool, *overrides: str) -> Any:
    def without(*arguments: Any) -> Any:
        trainer = Trainer(*arguments)
        if absent and rank == world - 1:
            trainer.model.layers["1"] = Skipped()
        return trainer

    with replaced_here(harness, Trainer=without):
        return train_layout(rank, world, layout, 2, *overrides)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_that_a_rank_does_not_use_hold_nobody_up(ranks: Ranks, zero: int) -> None:
    """The last rank's layer 1 is passed over: its gradient is that of the other rank alone, at every stage."""
    layout = Layout(data=2, zero=zero)
    ours, first = (ranks.run(2, train_without_a_layer, Layout(data=2, zero=z), True, *MODEL)[0] for z in (zero, 0))
    for mine, reference in zip(ours["gradients"], first["gradients"], strict=True):
        for name, gradient in reference.items():
            # a key's bias has gradient 0 in exact arithmetic: the terms that cancel give the scale of rounding
            scale = max(float(gradient.abs().max()), 0.01)
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * scale, msg=name)
    full = ranks.run(2, train_without_a_layer, layout, False, *MODEL)[0]
    assert ours["results"][0].loss != full["results"][0].loss
    assert float(ours["gradients"][0]["layers.1.mlp.up.weight"].abs().max()) > 0


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_bf16_moments_stay_near_fp32_ones(ranks: Ranks, optimizer: str) -> None:
    """An update is a mean gradient over the root of a mean square, each within 0.4 % / (1 - beta) of what it would be:
    4 % and half of 8 %. Sharded or not, the bits are the same: moments are rounded one by one."""
    overrides = (*OVERRIDES, "batch.micro_size=1", "batch.global_size=2", f"optimizer={optimizer}")
    overrides = (*overrides, "optimizer.betas=[0.9,0.95]", "optimizer.clip=null", "optimizer.lr=0.001")
    narrow = (*overrides, "optimizer.moments=bf16")
    wide = train_layout(0, 1, Layout(), 4, *overrides)
    ours = train_layout(0, 1, Layout(), 4, *narrow)
    for name in wide["weights"].keys() - {f"layers.{layer}.attention.key.bias" for layer in range(3)}:  # no gradient
        weight = wide["weights"][name]
        moved, apart = weight - wide["first"][name], ours["weights"][name] - weight
        assert 0 < float(apart.norm()) < 0.08 * float(moved.norm()), name
    first, second = (ranks.run(2, train_layout, Layout(data=2, zero=zero), 3, *narrow)[0] for zero in (1, 3))
    same_bits(second, first)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_messages_round_each_gradient_once_more(ranks: Ranks, zero: int) -> None:
    """Two roundings of 2^-9 each: of what is sent and of the sum."""
    overrides = (*MODEL, "optimizer.clip=null")
    layout = Layout(data=2, zero=zero)
    wide, narrow = (
        ranks.run(2, train_layout, layout, 1, *overrides, f"precision.reduce={reduce}")[0]
        for reduce in ("fp32", "bf16")
    )
    (exact,), (ours,) = wide["gradients"], narrow["gradients"]
    for name, gradient in exact.items():
        # a bias of keys has gradient 0 in exact arithmetic
        apart, size = float((ours[name] - gradient).norm()), float(gradient.norm())
        assert apart < 2**-8 * size or size < 1e-6, name
    assert any(not torch.equal(ours[name], gradient) for name, gradient in exact.items())


def test_masters_on_the_host_lie_beside_the_device() -> None:
    """Nothing is shared: what the copies carry is all that a device sees."""
    config = tiny("precision=bf16")
    model, table = build_model(config.model)
    sharding = Sharding(stage=3, offload=("optimizer", "parameters"))
    names, numel = tuple(table.shapes), sum(parameter.numel() for parameter in model.parameters())
    numbers = FlatSpec(0, 0, names, numel, numel, sharding, trained=True)
    unit = FlatParameter(model, numbers, table, 1, torch.bfloat16, torch.device("cpu"))
    tensors = [unit.weights, unit.local, unit.main, unit.grad, unit.host_grad]
    assert len({tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}) == 5


def started_over(rank: int, world: int, layout: Layout, words: tuple[str, ...]) -> None:
    """Compare two steps from the seed with two after a trainer has made others and started over."""
    trainer, batches = small_trainer(layout, *OVERRIDES, *words)
    weights = [shard.main.clone() for shard in trainer.parameters.shards]
    first = [trainer.train_step(batches) for _ in range(2)]
    trainer.start_over()
    assert all(torch.equal(shard.main, old) for shard, old in zip(trainer.parameters.shards, weights, strict=True))
    assert [trainer.train_step(batches) for _ in range(2)] == first


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), ("precision=fp16", "optimizer=lamb")),
        (Layout(data=2, zero=1), ("precision=bf16", "memory.offload=[optimizer]")),
        (Layout(data=2, zero=3), ("precision=fp8",)),
        (Layout(tensor=2), ("train.frozen=['layers.0.*']",)),
        (Layout(data=2, zero=2), ()),
        (Layout(data=2, expert=2), ("model.experts=4", "model.router.balance=bias")),
    ],
    ids=str,
)
def test_a_trainer_that_starts_over_makes_the_first_steps_again(
    ranks: Ranks, layout: Layout, words: tuple[str, ...]
) -> None:
    ranks.run(layout.world, started_over, layout, words)
