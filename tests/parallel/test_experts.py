"""Mixtures of experts: what the covering array of layouts has no values for, where a run goes on, what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pangu.collectives.context import ContextRegion
from pangu.evaluation.generation import Sampling, generate_shared
from pangu.layers import expert_exchange
from pangu.topology.layout import Layout
from pangu.training.validation import in_training
from tests.collective_counter import ALL_TO_ALL, counted
from tests.models.helpers import GROUPED_FLOPS
from tests.parallel.harness import OVERRIDES, compare, one_process, small_trainer, train_layout
from tests.parallel.test_any_to_any import CHECKPOINT, resume
from tests.parallel.test_layouts import PRECISIONS, follows_one_process
from tests.parallel.test_zero_runs import save
from tests.spawn import Pool
from tests.threads import Ranks, replaced_here

MODEL = (
    *OVERRIDES,
    "precision=fp64",
    "model.hidden=24",
    "model.layers=5",
    "model.experts=6",
    "model.expert_ffn=12",
    "batch.global_size=8",
)
LIMITED = (
    "model.router.selection=group_limited",
    "model.router.groups=3",
    "model.router.groups_per_token=2",
    "model.router.score=sigmoid",
    "model.router.scale=2.5",
)
FROZEN = ("embedding.", "layers.0.", "layers.1.mlp.router.")
CASES = {
    # layout, what one process is told too, what only the layout is told
    "micro_batches": (Layout(), ("model.expert_capacity=0.8", "model.router.z_loss=0.01"), ("batch.micro_size=4",)),
    "six": (
        Layout(tensor=2, data=3, expert=6, expert_tensor=1, sequence=True, zero=3),
        ("model.kind=gpt", "model.shared_experts=1", "batch.micro_size=1", "batch.global_size=6"),
        ("memory.recompute=full",),
    ),
    # all but routed experts, which `tests/parallel/cases.py` has no values for
    "fp8": (
        Layout(tensor=2, data=2, expert=2, sequence=True, zero=3),
        ("precision.matmul=fp8", "model.shared_experts=1", "model.expert_every=2"),
        ("parallel.overlap_chunks=2", "memory.recompute=selective"),
    ),
    "fp8_postponed": (
        Layout(pipeline=2),
        ("precision.matmul=fp8", "model.shared_experts=2", "model.activation=swiglu"),
        ("parallel.schedule=zb_h1",),
    ),
    "never_sharded": (Layout(data=2, expert=2, zero=3), ("optimizer=lamb",), ()),
    "copies_of_shards": (Layout(data=8, expert=2, zero=2, zero_group=4), ("batch.micro_size=1", "optimizer=lamb"), ()),
    "sequences_of_four": (
        Layout(data=2, context=4, expert=2, zero=3, zero_group=4),
        ("optimizer=lamb", "model.router.balance=bias", "model.expert_capacity=0.7", "model.expert_every=2", *LIMITED),
        (),
    ),
    # exchanges of fixed sizes: even ones, with choices that are dropped; shares of 2, 2, 1 and 1 tokens; two rows of
    # each sequence for each expert
    "each_group": (
        Layout(data=2, context=2, expert=4, zero=2),
        (
            *("model.experts=8", "model.router.selection=each_group", "model.router.groups=4", "data.packing.pad=null"),
            *("model.experts_per_token=4", "model.expert_capacity=0.8", "model.biases=true", "model.layers=3"),
        ),
        ("parallel.overlap_chunks=2", "memory.recompute=full", "batch.micro_size=2"),
    ),
    "uneven_shares": (
        Layout(tensor=4, expert=4, expert_tensor=1, sequence=True),
        ("model.experts=8", "model.expert_ffn=12", "model.biases=true", "batch.micro_size=1", "model.layers=3"),
        ("parallel.fixed_exchange=true", "parallel.overlap_chunks=3"),
    ),
    # halves of two sequences and one; of one with fp8, whose scales both halves raise
    "uneven_halves": (
        Layout(pipeline=2, data=2, expert=2, zero=2),
        ("batch.global_size=18", "model.shared_experts=1", "model.layers=3"),
        ("parallel.two_batch_overlap=true", "batch.micro_size=3", "memory.recompute=full", "train.check_step=true"),
    ),
    "fp8_halves": (
        Layout(data=2, expert=2, zero=3),
        ("precision.matmul=fp8", "model.shared_experts=1", "batch.micro_size=2", "model.layers=3"),
        ("parallel.two_batch_overlap=true", "memory.recompute=selective"),
    ),
    "narrow_rooms": (
        Layout(data=2, context=2, tensor=2, expert=2),
        (*LIMITED, "model.expert_capacity=0.3", "data.packing.pad=null", "batch.micro_size=2", "model.layers=3"),
        ("parallel.fixed_exchange=true", "memory.recompute=selective"),
    ),
    "frozen_router": (
        Layout(pipeline=2, data=2, expert=2, zero=3),
        (f"train.frozen=[{'*,'.join(FROZEN)}*]", "model.router.balance=bias", "batch.micro_size=1"),
        (),
    ),
}


def run_case(ranks: Ranks | Pool, name: str) -> None:
    """1e-12 relative, as dense models: the routes are the same, and sums are added in another order."""
    layout, model, own = CASES[name]
    one = one_process(2, *MODEL, *model)
    frozen = {weight for weight in one["first"] if name == "frozen_router" and weight.startswith(FROZEN)}
    compare(ranks.run(layout.world, train_layout, layout, 2, *MODEL, *model, *own)[0], one, 1e-12, frozen)
    assert all(result.experts["load"] > 1.0 for result in one["results"])


@pytest.mark.parametrize("name", CASES)
def test_experts_under_a_layout_equal_one_process(ranks: Ranks, name: str) -> None:
    run_case(ranks, name)


def test_processes_do_what_threads_do(pool: Pool) -> None:
    """With gloo's own exchange."""
    run_case(pool, "frozen_router")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_that_get_no_token_in_narrow_formats(ranks: Ranks, precision: str) -> None:
    """Two sequences of 16 tokens for 24 experts: a rank's grouped products have groups without rows."""
    words = ("model.experts=24", "model.layers=3", "model.experts_per_token=1", "batch.global_size=2")
    follows_one_process(ranks, Layout(data=2, expert=2), precision, (*MODEL, *words, "batch.micro_size=1"))


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


def exchanged_counts(rank: int, world: int) -> int:
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
    assert ranks.run(2, exchanged_counts) == [8, 8]


@pytest.mark.parametrize(("recompute", "times"), [("none", 4), ("selective", 4), ("full", 5)])
def test_a_product_whose_value_is_not_needed_again_is_not_computed_again(recompute: str, times: int) -> None:
    """Into an expert and out of it, in forward and backward, with biases. Four layers have experts of 12 columns; 256
    choices of 24 numbers."""
    trainer, batches = small_trainer(Layout(), *MODEL, f"memory.recompute={recompute}")
    with FlopCounterMode(display=False, custom_mapping=GROUPED_FLOPS) as counter:
        trainer.train_step(batches)
    assert counter.get_flop_counts()["Global"][torch.ops.pangu.grouped_matmul] == 4 * times * 2 * 256 * 24 * 12


def sent(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """Bytes that a rank's all-to-alls hold in a step."""
    trainer, batches = small_trainer(layout, *overrides)
    with counted() as totals:
        trainer.train_step(batches)
    return totals[ALL_TO_ALL].bytes


def test_a_recompute_sends_no_outputs_again(ranks: Ranks) -> None:
    """But tokens and weights, whatever is computed beside. Four layers have experts, two sequences each rank."""
    keys = (*MODEL, "batch.global_size=4", "batch.micro_size=1", "model.shared_experts=1")
    keys = (*keys, "model.router.selection=each_group", "model.router.groups=2")
    once, again = (
        sum(ranks.run(2, sent, Layout(data=2, expert=2), *keys, f"memory.recompute={which}"))
        for which in ("none", "full")
    )
    assert again - once == 2 * 2 * 4 * (16 * 2 * (24 + 1) * 8 + 6 * 4)


def questions(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """How often the host asks the device for numbers of rows in a step."""
    trainer, batches = small_trainer(layout, *MODEL, *overrides)
    times: list[None] = []

    def asking(counts: Tensor, most: Sequence[int]) -> Any:
        times.append(None)
        return counts.tolist()

    with replaced_here(expert_exchange, host_numbers=asking):
        trainer.train_step(batches)
    return len(times)


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ("", 8),
        ("memory.recompute=full", 16),
        ("parallel.fixed_exchange=true", 0),
        ("model.router.selection=each_group model.router.groups=2", 0),
        ("model.expert_capacity=1", 8),  # 16 x 2 / 6 choices, 6 at most: more than an even share
        ("model.expert_capacity=1 model.experts=8", 0),
        ("parallel.two_batch_overlap=true batch.micro_size=2", 8),  # for each half of one micro-batch
    ],
)
def test_the_host_asks_for_numbers_of_rows_only_where_they_are_not_fixed(ranks: Ranks, words: str, times: int) -> None:
    """Four layers have experts; two micro-batches of a sequence."""
    keys = ("batch.global_size=4", "batch.micro_size=1", *words.split())
    assert ranks.run(2, questions, Layout(data=2, expert=2), *keys) == [times, times]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("fixed", [False, True])
def test_bytes_of_all_to_alls_are_the_formulas(ranks: Ranks, fixed: bool, chunks: int) -> None:
    """Of each token's choices the hidden states and the weight go there, and the outputs come back; their gradients
    go the other way; numbers of rows are int32. Four layers have experts, two sequences of 16 tokens each rank. Both
    choices may be on either rank: with fixed sizes there is room for twice the rows."""
    layout, experts, width, count, layers, micro_batches = Layout(data=2, expert=2), 6, 24, 2, 4, 2
    keys = (
        *MODEL,
        "batch.global_size=4",
        "batch.micro_size=1",
        f"parallel.overlap_chunks={chunks}",
        f"parallel.fixed_exchange={str(fixed).lower()}",
        "model.kind=pangu",
    )
    rows = 2 * micro_batches * 16 * count * (1 + fixed)
    expected = layers * (2 * rows * (2 * width + 1) * 8 + 2 * micro_batches * chunks * experts * 4)
    assert sum(ranks.run(2, sent, layout, *keys)) == expected
