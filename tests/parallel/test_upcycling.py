"""A dense model's checkpoint begins a mixture of experts under every layout: with the dense model's logits and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.evaluation.inference import LoadedModel
from pangu.topology.layout import Layout
from pangu.training.resuming import begin_with
from tests.parallel.harness import grown_texts, whole
from tests.parallel.test_zero_runs import save, train, trainer_of
from tests.threads import Ranks

CHECKPOINT = Path("checkpoints") / "step-00000001"
WORDS = ("precision=fp64", "model.layers=5", "model.hidden=24", "optimizer=adam")
EXPERTS = ("model.experts=6", "checkpoint.upcycle=true", "model.router.balance_weight=0.1")
GATED = ("model.kind=gpt", "model.activation=swiglu", "model.biases=false", "model.norm_placement=post")
CASES = {
    # layout, what the dense model is told too, what the experts are
    "one_process": (Layout(), (), ("model.experts_per_token=1", "model.router.score=sigmoid")),
    "tensor": (Layout(tensor=2, sequence=True), GATED, ("model.experts_per_token=3", "model.dense_layers=1")),
    "zero_3": (
        Layout(data=4, zero=3, zero_group=2),
        (),
        ("model.router.selection=each_group", "model.router.groups=2", "memory.offload=[optimizer]"),
    ),
    "expert": (Layout(data=2, zero=2, expert=2), (), ("model.experts_per_token=3",)),
    "expert_tensor": (Layout(tensor=2, sequence=True, expert=2, expert_tensor=1), GATED, ("optimizer=lamb",)),
    "pipeline": (Layout(pipeline=2, data=2, zero=1), GATED, ("model.expert_every=2", "model.router.balance=bias")),
}


def begin(rank: int, world: int, layout: Layout, checkpoint: Path, *overrides: str) -> dict[str, Any]:
    """A new run's first weights, logits and losses of two steps."""
    trainer = trainer_of(layout, f"checkpoint.init_from={checkpoint}", *overrides)
    fresh = whole(trainer, of_gradients=False)
    begin_with(checkpoint, trainer.config, trainer)
    model = LoadedModel(trainer.runner, trainer.stages.schedule, trainer.mesh, trainer.config.model, None, None)
    logits, first = grown_texts(model), whole(trainer, of_gradients=False)
    losses = [result.loss for result in train(trainer, range(2))]
    return {"fresh": fresh, "first": first, "logits": logits, "losses": losses}


@pytest.mark.parametrize("case", CASES)
def test_experts_begin_as_copies_that_compute_what_the_dense_model_does(
    case: str, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1e-12: weights of a token's experts add up to 1 to rounding. Dropout drops the same. The second step is of other
    weights: each expert learned from its tokens."""
    layout, model, experts = CASES[case]
    save(0, 1, Layout(), str(tmp_path), 1, *WORDS, *model)
    dense = begin(0, 1, Layout(), tmp_path / CHECKPOINT, *WORDS, *model)
    caplog.clear()
    mixed = ranks.run(layout.world, begin, layout, tmp_path / CHECKPOINT, *WORDS, *model, *EXPERTS, *experts)[0]
    torch.testing.assert_close(mixed["logits"], dense["logits"], rtol=0, atol=1e-12)
    assert mixed["losses"][0] == pytest.approx(dense["losses"][0], rel=1e-12)
    assert mixed["losses"][1] != pytest.approx(dense["losses"][1], rel=1e-9)
    assert not caplog.messages  # nothing else differs
    copies = {name: tensor for name, tensor in mixed["first"].items() if ".experts." in name}
    assert {name.split(".experts.")[1].split(".")[0] for name in copies} == set("012345")
    for name, tensor in mixed["first"].items():
        of_router = ".router." in name
        expected: Tensor = mixed["fresh"][name] if of_router else dense["first"][source_of(name)]
        assert torch.equal(tensor, expected), name


def source_of(name: str) -> str:
    """layers.1.mlp.experts.5.up.weight -> layers.1.mlp.up.weight"""
    before, _, after = name.partition(".experts.")
    return f"{before}.{after.partition('.')[2]}" if after else name


def test_what_does_not_go_together_is_told(tmp_path: Path) -> None:
    """Checkpoints of dense models and of experts, and widths."""
    words = ("precision=fp64", "model.layers=2", "model.hidden=16")
    for name, more in (("dense", ()), ("mixed", ("model.experts=3",))):
        save(0, 1, Layout(), str(tmp_path / name), 1, *words, *more)
    dense, mixed = tmp_path / "dense" / CHECKPOINT, tmp_path / "mixed" / CHECKPOINT
    for checkpoint, upcycle, more, said in (
        (dense, "false", (), r"its model has no experts; set checkpoint.upcycle=true to copy its dense"),
        (mixed, "true", (), r"its model has experts; set checkpoint.upcycle=false to start from its weights"),
        (dense, "true", ("model.ffn=48",), r"layers\.0\.mlp\.up\.weight: \[64, 16\] in the checkpoint, \[48, 16\] in"),
    ):
        with pytest.raises(UserError, match=said):
            begin(0, 1, Layout(), checkpoint, *words, "model.experts=3", f"checkpoint.upcycle={upcycle}", *more)
    again = begin(0, 1, Layout(), mixed, *words, "model.experts=3")
    assert ".mlp.experts.2.up.weight" in "".join(again["first"])
