"""Learning rates and weight decays by name: the same on every layout, and patterns that make no sense are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pangu.common.errors import ConfigError
from pangu.config.optimizer import ParameterGroup
from pangu.models.groups import check_groups
from pangu.topology.layout import Layout
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, small_trainer, whole
from tests.threads import Ranks

MODEL = (
    *(*OVERRIDES, "precision=fp64", "model.hidden=48", "model.heads=12", "model.ffn=96", "model.layers=3"),
    *("batch.global_size=4", "batch.micro_size=1", "optimizer.clip=null", "optimizer.weight_decay=0.5"),
    *("model.experts=4", "model.expert_ffn=24", "model.router.balance=none"),
)
GROUPS = (
    "parameter_groups=[{names:[embedding.*,'*.experts.1.*'],lr_multiplier:0.5},"
    "{names:['*.query.*','*.router.*','*.experts.*'],lr_multiplier:2,weight_decay_multiplier:0}]"
)
LAYOUTS = {
    "zero_2_tensor": (Layout(2, 1, 2, 2, sequence=True), ()),
    "zero_3": (Layout(data=4, zero=3), ("memory.offload=[optimizer,parameters]",)),
    "pipeline": (Layout(1, 2, 2, 1), ()),
    "experts": (Layout(2, 1, 2, 1, sequence=True, expert=2), ()),
    "experts_cut": (Layout(2, 1, 2, 2, sequence=True, expert=4, expert_tensor=1), ()),
}


def moved(rank: int, world: int, layout: Layout, *overrides: str) -> dict[str, Tensor]:
    """Weights after two steps, and from where the first one moved them."""
    trainer, batches = small_trainer(layout, *overrides)
    before = {f"before {name}": one.clone() for name, one in whole(trainer, of_gradients=False).items()}
    for _ in range(2):
        trainer.train_step(batches)
    return {**before, **whole(trainer, of_gradients=False)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["adam", "lamb", "muon"])
def test_groups_are_the_same_on_every_layout(ranks: Ranks, optimizer: str, layout: str) -> None:
    """1e-12: sums of at most 96 products in another order, 1.1e-16 each, and divisions by norms of many weights."""
    own, more = LAYOUTS[layout]
    words = (*MODEL, GROUPS, f"optimizer={optimizer}")
    ours = ranks.run(own.world, moved, own, *words, *more)[0]
    for name, one in moved(0, 1, Layout(), *words).items():
        if not name.endswith("key.bias"):  # softmax ignores it: its gradient is rounding, which Adam enlarges
            torch.testing.assert_close(ours[name], one, rtol=1e-11, atol=1e-12, msg=name)


def first_update(*overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Initial weights, and how far the first update moves them."""
    trainer, batches = small_trainer(Layout(), *MODEL, *overrides)
    before = {name: one.clone() for name, one in whole(trainer, of_gradients=False).items()}
    trainer.train_step(batches)
    return before, {name: one - before[name] for name, one in whole(trainer, of_gradients=False).items()}


@pytest.mark.parametrize("optimizer", ["adam", "lamb", "muon"])
def test_a_multiplier_multiplies_the_update_of_its_tensors(optimizer: str) -> None:
    words = (f"optimizer={optimizer}", "optimizer.weight_decay=0")
    (_, plain), (_, grouped) = first_update(*words), first_update(*words, GROUPS)
    factors = set()
    for name, one in plain.items():
        first = name.startswith("embedding.") or ".experts.1." in name
        factor = 0.5 if first else 2.0 if any(f".{part}." in name for part in ("query", "router", "experts")) else 1.0
        factors.add(factor)
        torch.testing.assert_close(grouped[name], factor * one, rtol=1e-9, atol=1e-14, msg=name)
    assert factors == {0.5, 1.0, 2.0}


def test_tensors_without_decay_do_not_shrink() -> None:
    """The learning rate of the first update is 0.005, and its decay 0.5."""
    group = "parameter_groups=[{names:['*.query.*'],weight_decay_multiplier:0}]"
    (weights, decayed), (_, kept) = first_update("optimizer=adam"), first_update("optimizer=adam", group)
    for name, one in weights.items():
        decay = 0.005 * 0.5 if ".query.weight" in name else 0.0
        torch.testing.assert_close(kept[name] - decayed[name], decay * one, rtol=1e-9, atol=1e-14, msg=name)


def problems(*groups: ParameterGroup, frozen: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        check_groups(tiny().model, frozen, groups)
    return str(caught.value)


def test_patterns_that_fit_nothing_are_refused() -> None:
    text = problems(ParameterGroup(("embeding.*",)))
    assert "parameter_groups[0].names = embeding.*: matches no trained tensor in the model; similar names: " in text
    assert "embedding." in text
    assert "[0].names = final_norm.*: matches no trained" in problems(
        ParameterGroup(("final_norm.*",)), frozen=("final_norm.*",)
    )
    text = problems(ParameterGroup(("*.query.*",)), ParameterGroup(("layers.0.attention.query.weight",)))
    assert "parameter_groups[1].names = layers.0.attention.query.weight: matches only tensors of earlier groups" in text
    assert "parameter_groups[0].names = []: needs a pattern" in problems(ParameterGroup(()))
    check_groups(tiny().model, (), (ParameterGroup(("*.query.*",)), ParameterGroup(("*.attention.*",))))
