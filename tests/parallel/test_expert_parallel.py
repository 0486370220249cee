"""Experts on several ranks: every layout equals one process."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pangu.collectives.context import ContextRegion
from pangu.config.layout_checks import layout_problems
from pangu.evaluation.generation import Sampling, generate_shared
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Layout
from pangu.training import step
from pangu.training.step import StepResult
from pangu.training.validation import in_training
from pangu.zero import weight_products
from tests.collective_counter import ALL_TO_ALL, counted
from tests.configs import tiny
from tests.parallel.harness import compare, one_process, parallel_keys, small_trainer, train_layout
from tests.parallel.test_any_to_any import CHECKPOINT, resume
from tests.parallel.test_experts import GROUPED, LIMITED, MODEL
from tests.parallel.test_layouts import CHUNKS, PRECISIONS, add_product, two_steps
from tests.parallel.test_zero_runs import save
from tests.spawn import Pool
from tests.threads import Ranks, replaced_here

CASES = {
    # layout, what one process is told too, what only the layout is told
    "two": (Layout(data=2, expert=2), ("model.router.z_loss=0.01",), ()),
    "copies": (Layout(data=4, expert=2), ("model.expert_capacity=0.8", "batch.micro_size=1"), ()),
    "parts": (
        Layout(data=2, expert=2),
        ("model.shared_experts=1", "model.expert_capacity=1", "model.router.balance=global"),
        ("parallel.overlap_chunks=3", "memory.recompute=full"),
    ),
    "cut": (
        Layout(tensor=2, data=2, expert=2),
        ("model.shared_experts=2", "optimizer=lamb", *GROUPED),
        ("memory.recompute=selective",),
    ),
    "cut_sequence": (
        Layout(tensor=2, data=2, expert=2, sequence=True, zero=1),
        ("model.activation=swiglu", "model.biases=false", "optimizer=lamb", "model.expert_capacity=0.7"),
        ("parallel.overlap_chunks=2",),
    ),
    "whole": (
        Layout(tensor=2, data=2, expert=2, expert_tensor=1),
        ("optimizer=lamb", "model.router.balance=bias", "model.expert_capacity=0.9", *LIMITED),
        (),
    ),
    "whole_sequence": (
        Layout(tensor=2, data=3, expert=6, expert_tensor=1, sequence=True, zero=3),
        ("model.kind=gpt", "model.shared_experts=1", "batch.micro_size=1", "batch.global_size=6"),
        ("memory.recompute=full",),
    ),
    "whole_on_all": (
        Layout(tensor=2, data=2, expert=1, expert_tensor=1, zero=2),
        ("optimizer=lamb", "model.router.z_loss=0.1"),
        (),
    ),
    "zero_1": (Layout(data=4, expert=2, zero=1), ("optimizer=lamb", "batch.micro_size=1"), ()),
    "zero_2": (
        Layout(data=4, expert=2, zero=2),
        ("optimizer=lamb", "batch.micro_size=1", "model.dense_layers=1"),
        ("memory.offload=[optimizer,activations]",),
    ),
    "zero_3": (
        Layout(data=4, expert=2, zero=3),
        ("optimizer=lamb", "batch.micro_size=1", "model.expert_every=2"),
        ("memory.offload=[optimizer,parameters]", "memory.recompute=selective"),
    ),
    "zero_3_alone": (Layout(data=2, expert=2, zero=3), ("optimizer=lamb",), ()),
    "hybrid": (
        Layout(data=4, expert=2, zero=3, zero_group=2),
        ("model.kind=gpt", "batch.micro_size=1", "model.norm_placement=post"),
        (),
    ),
    "hybrid_of_copies": (Layout(data=8, expert=2, zero=2, zero_group=4), ("batch.micro_size=1", "optimizer=lamb"), ()),
    "pipeline": (
        Layout(pipeline=3, data=2, expert=2, zero=2),
        ("model.router.balance=bias", "model.expert_every=2", "model.experts_per_token=3", "batch.micro_size=1"),
        (),
    ),
    "interleaved": (
        Layout(pipeline=2, virtual=2, data=2, expert=2),
        ("batch.micro_size=1", "optimizer=lamb"),
        ("parallel.schedule=interleaved",),
    ),
    "zero_bubble": (
        Layout(pipeline=2, data=2, expert=2, virtual=2, zero=1),
        ("model.kind=gpt", "model.shared_experts=2", "model.expert_capacity=0.7", "batch.micro_size=1"),
        ("parallel.schedule=zb_v", "memory.recompute=selective", "parallel.overlap_chunks=2"),
    ),
    "zero_bubble_recomputed": (
        Layout(pipeline=2, tensor=2, data=2, expert=4, expert_tensor=1, sequence=True),
        ("model.router.balance=global", "batch.micro_size=1", "model.experts=8"),
        ("parallel.schedule=zb_h1", "memory.recompute=full"),
    ),
    "sequences_of_four": (
        Layout(data=2, context=4, expert=2, zero=3, zero_group=4),
        ("optimizer=lamb", "model.router.balance=bias", "model.expert_capacity=0.7", "model.expert_every=2", *LIMITED),
        (),
    ),
    "frozen": (
        Layout(pipeline=2, data=2, expert=2, zero=3),
        ("train.frozen=[embedding.*,layers.0.*,layers.1.mlp.router.*]", "batch.micro_size=1"),
        (),
    ),
}


@pytest.mark.parametrize("products", [False, True], ids=["", "products_add"])
@pytest.mark.parametrize("case", CASES)
def test_experts_on_several_ranks_equal_one_process(ranks: Ranks, case: str, products: bool) -> None:
    """1e-12 relative, as in `test_experts`."""
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


def test_processes_do_what_threads_do(pool: Pool) -> None:
    """With gloo's own exchange."""
    layout, model, own = CASES["cut"]
    one = one_process(3, *MODEL, *model)
    compare(pool.run(layout.world, train_layout, layout, 3, *MODEL, *model, *own)[0], one, 1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_that_get_no_token_in_narrow_formats(ranks: Ranks, precision: str) -> None:
    """Two sequences of 16 tokens for 24 experts: a rank's grouped products have groups without rows."""
    layout = Layout(data=2, expert=2)
    model = (
        *MODEL,
        f"precision={precision}",
        "model.experts=24",
        "model.layers=3",
        "model.experts_per_token=1",
        "batch.global_size=2",
        "batch.micro_size=1",
        *(["precision.loss_scale.initial=1024"] * (precision == "fp16")),
    )
    tolerance = PRECISIONS[precision]
    results: list[StepResult] = ranks.run(layout.world, two_steps, layout, *model)[0]
    for mine, reference in zip(results, two_steps(0, 1, Layout(), *model), strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)


BEFORE_AND_AFTER = [
    (Layout(data=4, expert=2, zero=3), Layout(tensor=2)),
    (Layout(tensor=2, data=2, expert=2), Layout(data=2, expert=2, zero=2)),
    (Layout(), Layout(tensor=2, data=2, expert=4, expert_tensor=1, zero=1)),
    (Layout(data=3, expert=3, zero=1), Layout(pipeline=2, data=2, expert=2)),
]


@pytest.mark.parametrize(("before", "after"), BEFORE_AND_AFTER, ids=str)
def test_a_run_goes_on_with_its_experts_elsewhere(before: Layout, after: Layout, ranks: Ranks, tmp_path: Path) -> None:
    """Moments, biases of the router and all. In fp64 the next step is that of the run that was not interrupted."""
    model = (*MODEL, "model.experts=12", "batch.global_size=12", "batch.micro_size=1", "model.router.balance=bias")
    model = (*model, "parallel.schedule=1f1b", "optimizer=lamb")
    expected = ranks.run(before.world, save, before, str(tmp_path), 1, *model)[0]
    words = (after, tmp_path / CHECKPOINT, str(tmp_path / "aside"), *model)
    resumed = ranks.run(after.world, resume, *words)[0]
    assert resumed.first.keys() == expected.first.keys()
    assert all(torch.equal(loaded, expected.first[name]) for name, loaded in resumed.first.items())
    assert resumed.loss == pytest.approx(expected.loss, rel=1e-12)
    assert max(float((resumed.second[name] - weight).abs().max()) for name, weight in expected.second.items()) <= 1e-12


def texts(rank: int, world: int, layout: Layout) -> list[list[int]]:
    """Drawn by a model in training for one prompt, which two replicas cannot share."""
    trainer, _ = small_trainer(layout, *MODEL)
    prompts = [[5, 6, 7]]
    return generate_shared(in_training(trainer.config, trainer, None), prompts, Sampling(max_tokens=4, temperature=0.0))


def test_replicas_that_share_experts_draw_texts_together(ranks: Ranks) -> None:
    one = texts(0, 1, Layout())
    assert ranks.run(2, texts, Layout(data=2, expert=2)) == [one, one]


def told(rank: int, world: int) -> int:
    """How often the ranks that share sequences tell each other their choices in a step."""
    words = ("batch.micro_size=1", "batch.global_size=2", "model.expert_capacity=1", "memory.recompute=full")
    trainer, batches = small_trainer(Layout(context=2), *MODEL, *words)
    totals, times = ContextRegion.totals, []

    def counting(region: ContextRegion, counts: Tensor) -> tuple[Tensor, Tensor]:
        times.append(counts.shape)
        return totals(region, counts)

    with replaced_here(ContextRegion, totals=counting):
        trainer.train_step(batches)
    return len(times)


def test_a_recompute_tells_nobody_its_choices_again(ranks: Ranks) -> None:
    """Four layers have experts; two micro-batches."""
    assert ranks.run(2, told) == [8, 8]


def sent(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """Bytes that a rank's all-to-alls hold in a step."""
    trainer, batches = small_trainer(layout, *overrides)
    with counted() as totals:
        trainer.train_step(batches)
    return totals[ALL_TO_ALL].bytes


@pytest.mark.parametrize("chunks", [1, 2])
def test_bytes_of_all_to_alls_are_the_formulas(ranks: Ranks, chunks: int) -> None:
    """Of each token's choices the hidden states and the weight go there, and the outputs come back; their gradients
    go the other way; numbers of rows are int64. Four layers have experts, two sequences of 16 tokens each rank."""
    layout, experts, width, count, layers, micro_batches = Layout(data=2, expert=2), 6, 24, 2, 4, 2
    keys = (
        *MODEL,
        "batch.global_size=4",
        "batch.micro_size=1",
        f"parallel.overlap_chunks={chunks}",
        "model.kind=pangu",
    )
    rows = 2 * micro_batches * 16 * count
    expected = layers * (2 * rows * (2 * width + 1) * 8 + 2 * micro_batches * chunks * experts * 8)
    assert sum(ranks.run(2, sent, layout, *keys)) == expected


def random_case(seed: int) -> tuple[Layout, tuple[str, ...], tuple[str, ...]]:
    """Any layout of up to 8 ranks that splits the experts, with any options, which the checks accept."""
    draw = Random(seed)
    while True:
        tensor, pipeline, data = (draw.choice(sizes) for sizes in ((1, 2, 4), (1, 1, 2, 3), (1, 2, 3, 4, 8)))
        expert, expert_tensor = draw.choice((1, 2, 3, 4, 6, 8)), draw.choice((0, 0, 1))
        schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v")) if pipeline > 1 else "1f1b"
        virtual, zero = CHUNKS[schedule], draw.choice((0, 1, 2, 3))
        sequence = tensor > 1 and draw.random() < 0.5
        group = draw.choice([0, *(d for d in (1, 2, 4) if data % d == 0)]) if zero else 0
        try:
            layout = Layout(tensor, pipeline, data, zero, sequence, virtual, group, 1, expert, expert_tensor)
            fits = layout.splits_experts and layout.world <= 8 and bool(ExpertLayout(layout).shards)
        except AssertionError:
            continue
        model = (
            *MODEL,
            "model.experts=24",
            "model.hidden=24",
            f"model.layers={draw.choice((4, 5))}",
            f"batch.global_size={2 * data}",
            "batch.micro_size=1",
            f"model.kind={draw.choice(('gpt', 'pangu'))}",
            f"model.activation={draw.choice(('gelu', 'swiglu'))}",
            f"model.biases={draw.choice(('true', 'false'))}",
            f"model.experts_per_token={draw.choice((1, 2, 3))}",
            f"model.expert_capacity={draw.choice(('null', '0.6', '1.5'))}",
            f"model.shared_experts={draw.choice((0, 2))}",
            f"model.dense_layers={draw.choice((0, 1))}",
            f"model.router.balance={draw.choice(('sequence', 'global', 'bias'))}",
            f"model.router.score={draw.choice(('softmax', 'sigmoid'))}",
            f"optimizer={draw.choice(('adam', 'lamb'))}",
        )
        own = (
            f"parallel.schedule={schedule}",
            f"parallel.overlap={draw.choice(('true', 'false'))}",
            f"parallel.overlap_chunks={draw.choice((1, 2, 3)) if tensor > 1 or expert > 1 else 1}",
            f"memory.recompute={draw.choice(('none', 'full', 'selective', '1'))}",
            f"memory.offload=[{draw.choice(('', 'optimizer', 'activations'))}]",
        )
        chosen = tiny(*model, *own, *parallel_keys(layout))
        if fits and not layout_problems(chosen, layout.world):
            return layout, model, own


def without(found: dict[str, Any], idle: set[str]) -> dict[str, Any]:
    """Without some tensors, whose gradients are 0."""
    assert all(not gradients[name].any() for gradients in found["gradients"] for name in idle)
    kept = {key: {n: x for n, x in found[key].items() if n not in idle} for key in ("first", "weights")}
    gradients = [{n: x for n, x in of_step.items() if n not in idle} for of_step in found["gradients"]]
    return {**found, **kept, "gradients": gradients}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_random_layouts_of_experts_equal_one_process(ranks: Ranks, seed: int) -> None:
    """Some experts get no token."""
    layout, model, own = random_case(seed)
    one = one_process(2, *model)
    ours = ranks.run(layout.world, train_layout, layout, 2, *model, *own)[0]
    idle = {n for n, weight in one["weights"].items() if ".experts." in n and torch.equal(weight, one["first"][n])}
    compare(without(ours, idle), without(one, idle), 1e-12)
