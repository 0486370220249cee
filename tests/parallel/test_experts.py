"""Mixtures of experts: every layout equals one process, and so do micro-batches of any size."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from pangu.topology.layout import Layout
from pangu.training import step
from pangu.zero import weight_products
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.parallel.test_layouts import add_product
from tests.threads import Ranks

MODEL = (
    *OVERRIDES,
    "precision=fp64",
    "model.hidden=24",
    "model.layers=5",
    "model.experts=6",
    "model.expert_ffn=12",
    "batch.global_size=8",
)
GROUPED = ("model.router.selection=each_group", "model.router.groups=2", "model.router.normalised=false")
LIMITED = (
    "model.router.selection=group_limited",
    "model.router.groups=3",
    "model.router.groups_per_token=2",
    "model.router.score=sigmoid",
    "model.router.scale=2.5",
)
CASES = {
    # layout, what one process is told too, what only the layout is told
    "micro_batches": (Layout(), ("model.expert_capacity=0.8", "model.router.z_loss=0.01"), ("batch.micro_size=4",)),
    "replicas": (Layout(data=4), ("model.router.balance=global", "batch.micro_size=1"), ()),
    "tensor": (Layout(tensor=2), ("model.expert_capacity=1", "model.router.z_loss=0.01", *GROUPED), ()),
    "sequence": (
        Layout(tensor=4, sequence=True),
        ("model.router.balance=bias", "model.shared_experts=1", *LIMITED),
        ("memory.recompute=full",),
    ),
    "zero_1": (Layout(data=2, zero=1), ("optimizer=lamb", "model.activation=swiglu", "model.biases=false"), ()),
    "zero_2": (
        Layout(data=2, zero=2, tensor=2),
        ("optimizer=lamb", "model.dense_layers=1", "model.expert_capacity=1.2"),
        ("memory.recompute=selective",),
    ),
    "zero_3": (
        Layout(data=4, zero=3, zero_group=2),
        ("model.kind=gpt", "model.norm_placement=post", "model.router.balance=global", "batch.micro_size=1"),
        ("memory.recompute=selective", "memory.offload=[optimizer,activations]"),
    ),
    "pipeline": (
        Layout(pipeline=3, data=2, zero=2),
        ("model.router.balance=bias", "model.expert_every=2", "model.experts_per_token=3", "batch.micro_size=1"),
        (),
    ),
    "zero_bubble": (
        Layout(pipeline=2, tensor=2, sequence=True, virtual=2),
        ("model.kind=gpt", "model.shared_experts=2", "model.expert_capacity=0.7", *GROUPED, "optimizer=lamb"),
        ("parallel.schedule=zb_v", "memory.recompute=selective", "parallel.overlap_chunks=2"),
    ),
    "zero_bubble_recomputed": (
        Layout(pipeline=2, data=2, zero=1),
        ("model.router.balance=global", "model.router.z_loss=0.1", "batch.micro_size=1"),
        ("parallel.schedule=zb_h1", "memory.recompute=full"),
    ),
    "context": (
        Layout(context=2, tensor=2, sequence=True),
        ("model.expert_capacity=0.7", "model.router.z_loss=0.01", "model.router.score=sigmoid"),
        ("memory.recompute=full",),
    ),
    "context_of_replicas": (
        Layout(context=2, data=2, pipeline=2, zero=3),
        ("model.expert_capacity=1", "model.router.balance=bias", "model.kind=gpt", "batch.micro_size=1", *GROUPED),
        ("parallel.context_kind=ring",),
    ),
    "context_and_expert": (
        Layout(context=2, data=2, expert=2, zero=1),
        ("model.expert_capacity=0.8", "model.router.z_loss=0.01", "batch.micro_size=1"),
        (),
    ),
    "frozen": (
        Layout(pipeline=2, data=2, zero=3),
        ("train.frozen=[embedding.*,layers.0.*,layers.1.mlp.router.*]", "model.router.balance=bias"),
        (),
    ),
}


@pytest.mark.parametrize("products", [False, True], ids=["", "products_add"])
@pytest.mark.parametrize("case", CASES)
def test_experts_under_every_layout_equal_one_process(ranks: Ranks, case: str, products: bool) -> None:
    """1e-12 relative, as dense models: the routes are the same, and sums are added in another order."""
    layout, model, own = CASES[case]
    if products and case not in ("zero_bubble", "zero_2"):
        return
    one = one_process(3, *MODEL, *model)
    with (
        patch.object(step, "products_add", lambda device: products),
        patch.object(weight_products, "add_product", add_product),
    ):
        ours = ranks.run(layout.world, train_layout, layout, 3, *MODEL, *model, *own)[0]
    frozen = {name for name in one["first"] if name.startswith(("embedding", "layers.0.", "layers.1.mlp.router"))}
    compare(ours, one, 1e-12, frozen if case == "frozen" else ())
    for mine, reference in zip(ours["results"], one["results"], strict=True):
        assert mine.experts == pytest.approx(reference.experts, rel=1e-12)
        assert reference.experts["load"] > 1.0
