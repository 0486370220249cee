"""The state of Muon converts to that of `torch.optim.Muon` and `torch.optim.AdamW`, and back, whatever shards it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.data.loader import Loader
from pangu.topology.layout import Layout
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from tests.parallel.harness import samples_of, whole
from tests.parallel.test_zero_runs import Steps, save, train, trainer_of, two_states
from tests.threads import Ranks

WORDS = ("precision=fp64", "optimizer=muon", "optimizer.clip=null", "checkpoint.asynchronous=false")
BEFORE, AFTER = Layout(2, 1, 2, 2, sequence=True), Layout(data=4, zero=3)


def plain_optimizers(trainer: Trainer) -> tuple[dict[str, Tensor], list[torch.optim.Optimizer]]:
    """Copies of the weights of one process by name, and torch's optimizers of matrices, of other tensors and of
    vectors, with copies of the trainer's state."""
    config: Any = trainer.config.optimizer
    shards = {shard.placement.name: shard for shard in trainer.parameters.shards}
    weights = {name: shard.main.view(shard.placement.shape).clone() for name, shard in shards.items()}
    names: list[list[str]] = [[], [], []]
    for name, shard in shards.items():
        names[0 if shard.placement.is_matrix else 1 + shard.placement.is_vector].append(name)
    matrices, others, vectors = ([weights[name] for name in of] for of in names)
    rule = {"weight_decay": config.weight_decay, "momentum": config.momentum, "adjust_lr_fn": config.adjust_lr}
    options = {"betas": config.betas, "eps": config.eps}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, **rule),
        torch.optim.AdamW(others, **options, weight_decay=config.weight_decay),
        torch.optim.AdamW(vectors, **options, weight_decay=0.0),
    ]
    for optimizer, of in zip(optimizers, names, strict=True):
        ours = [trainer.optimizer.state[shards[name].main] for name in of]
        shaped = [
            {kind: value.clone().view(weights[name].shape if kind != "step" else ()) for kind, value in one.items()}
            for name, one in zip(of, ours, strict=True)
        ]
        if isinstance(optimizer, torch.optim.Muon):
            assert all(one.keys() == {"step", "exp_avg"} for one in ours)
            shaped = [{"momentum_buffer": one["exp_avg"]} for one in shaped]
        state = {"state": dict(enumerate(shaped)), "param_groups": optimizer.state_dict()["param_groups"]}
        optimizer.load_state_dict(state)
    return weights, optimizers


def take_state(trainer: Trainer, weights: dict[str, Tensor], optimizers: list[torch.optim.Optimizer]) -> None:
    """Put weights and state dicts of torch's optimizers in place of those of a trainer on one process."""
    shards = {weights[shard.placement.name]: shard for shard in trainer.parameters.shards}
    state = trainer.optimizer.state_dict()
    numbers = {
        one: number for number, one in enumerate(one for g in trainer.optimizer.param_groups for one in g["params"])
    }
    states = {}
    (steps,) = {float(one["step"]) for optimizer in optimizers[1:] for one in optimizer.state.values()}
    for optimizer in optimizers:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for number, theirs in optimizer.state_dict()["state"].items():
            moments = {kind.replace("momentum_buffer", "exp_avg"): value.flatten() for kind, value in theirs.items()}
            states[numbers[shards[tensors[number]].main]] = {**moments, "step": torch.tensor(steps)}
    for tensor, shard in shards.items():
        trainer.optimizer.state[shard.main]["exp_avg"].fill_(torch.nan)
        shard.main.copy_(tensor.flatten())
    trainer.optimizer.load_state_dict({**state, "state": states})
    trainer.parameters.publish()


def third_step(rank: int, world: int, layout: Layout, checkpoint: Path, *overrides: str) -> Steps:
    trainer = trainer_of(layout, f"train.output={checkpoint.parent / 'aside'}", *overrides)
    load_checkpoint(checkpoint, trainer.config, trainer)
    return two_states(trainer, 2)


def test_the_state_goes_to_torch_and_comes_back(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ranks that share it, by a checkpoint, to torch, which makes a step, and on to ranks that share it otherwise;
    each step is that of the run that is not interrupted, to 1e-12. Torch's iterations are in bfloat16 otherwise."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    sharded = ranks.run(BEFORE.world, save, BEFORE, str(tmp_path / "sharded"), 1, *WORDS)[0]
    trainer = trainer_of(Layout(), f"train.output={tmp_path / 'alone'}", *WORDS)
    load_checkpoint(tmp_path / "sharded/checkpoints/step-00000001", trainer.config, trainer)
    weights, optimizers = plain_optimizers(trainer)
    batch, packing = trainer.config.batch, trainer.config.data.packing
    with Loader(samples_of(packing), packing, batch.global_size, batch.micro_size, 0, 1) as loader:
        trainer.forward_backward(loader.micro_batches(batch.global_size))
    gradients = whole(trainer, of_gradients=True)
    rate = trainer.read(trainer.update()).lr
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    for name, weight in weights.items():
        weight.grad = gradients[name]
    for optimizer in optimizers:
        optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, sharded.second[name], rtol=0, atol=1e-12, msg=name)
    take_state(trainer, weights, optimizers)
    with Saver(trainer.config, trainer) as saver:
        saver.save(2 * batch.global_size, {})
    found = ranks.run(AFTER.world, third_step, AFTER, tmp_path / "alone/checkpoints/step-00000002", *WORDS)[0]
    unbroken = trainer_of(Layout(), *WORDS)
    train(unbroken, range(3))
    for name, weight in whole(unbroken, of_gradients=False).items():
        torch.testing.assert_close(found.second[name], weight, rtol=0, atol=1e-12, msg=name)
        assert not torch.equal(found.second[name], weights[name])
