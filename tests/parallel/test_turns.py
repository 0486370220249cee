"""Layers take turns in the order of the step's list, whatever it is (`parallel.two_batch_overlap`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pangu.common.errors import LocalError
from pangu.dryrun.run import dry_run
from pangu.layers.turns import LayerPart, Turn
from pangu.pipeline import stages
from pangu.pipeline.layouts import choose_layout
from pangu.pipeline.stages import plan_stages
from pangu.schedule.expand import Expansion
from pangu.schedule.orders import OVERLAPPED
from pangu.topology.layout import Layout
from pangu.zero.stage_parameters import StageParameters
from tests.configs import composed, tiny
from tests.parallel.harness import OVERRIDES, parallel_keys, small_trainer
from tests.threads import Ranks, replaced_here

ATTENTION, EXPERTS, OUTPUT = LayerPart
APART = tuple(Turn(part, half) for half in (0, 1) for part in LayerPart)
"""One half after the other: nothing computes while its tokens travel."""
IN_PART = (Turn(ATTENTION, 0), Turn(ATTENTION, 1), Turn(EXPERTS, 0), Turn(OUTPUT, 0), Turn(EXPERTS, 1), Turn(OUTPUT, 1))
"""Tokens on their way to the experts are overlapped, and outputs are not."""
ORDERS = {"overlapped": OVERLAPPED, "apart": APART, "in part": IN_PART}
WORDS = (
    *OVERRIDES,
    *("precision=fp64", "model.layers=3", "model.experts=4", "model.expert_ffn=12", "model.shared_experts=1"),
    *("batch.global_size=8", "batch.micro_size=2", "parallel.two_batch_overlap=true", "train.check_step=true"),
)


def exposed(turns: Sequence[Turn]) -> int:
    """Number of the four exchanges of a pass that are waited for before anything has computed beside them.

    They travel in the order in which they start, so that waiting for one waits for those before it.
    """
    in_flight, count, taken = list[int](), 0, [0, 0]
    for part, half in turns:
        if taken[half] and half in in_flight:
            waited = in_flight.index(half) + 1
            in_flight, count = in_flight[waited:], count + waited
        if part is not OUTPUT:
            in_flight.clear()  # attention and experts hide all of them
        taken[half] += 1
        if taken[half] < len(LayerPart):
            in_flight.append(half)
    return count


def trained(rank: int, world: int, layout: Layout, *words: str) -> list[Any]:
    """Losses and norms of two steps, and the weights after them."""
    trainer, batches = small_trainer(layout, *WORDS, *words)
    results = [trainer.train_step(batches) for _ in range(2)]
    weights = [shard.main.clone() for shard in trainer.parameters.shards]
    return [[number for one in results for number in (one.loss, one.grad_norm)], weights]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_orders_give_the_same_bits(ranks: Ranks, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with its list, turn by turn, forward and backward."""
    layout, results = Layout(pipeline=2, data=2, expert=2, zero=2), []
    for turns in ORDERS.values():
        monkeypatch.setattr(stages, "OVERLAPPED", turns)
        results.append(ranks.run(4, trained, layout, f"memory.recompute={recompute}"))
    for found in results[1:]:
        for (numbers, weights), (same_numbers, same_weights) in zip(results[0], found, strict=True):
            assert numbers == same_numbers
            assert all(map(torch.equal, weights, same_weights))


@pytest.mark.parametrize("name", ORDERS)
def test_a_dry_run_exposes_what_the_list_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes that travel to experts and back, in both passes of a layer."""
    turns = ORDERS[name]
    monkeypatch.setattr(stages, "OVERLAPPED", turns)
    counts = exposed(turns), exposed(turns[::-1])
    assert counts == {"overlapped": (1, 1), "apart": (4, 4), "in part": (2, 3)}[name]
    words = "parallel.pipeline=1 parallel.tensor=1 parallel.data=8 parallel.expert=8 parallel.two_batch_overlap=true"
    told = "+config=mixtral_8x7b data=synthetic dry_run=true model.layers=2 batch.micro_size=2 batch.global_size=32"
    chosen = choose_layout(composed(*told.split(), *words.split(), "memory.recompute=none"), 1)
    sent = dry_run(chosen, 0, torch.device("cpu"), whole=True).collectives["expert"]["all_to_all"]
    assert 1 - sent.get("hidden_bytes", 0) / sent["bytes"] == pytest.approx(sum(counts) / 8, rel=0.01)


def test_the_list_reduces_experts_before_it_computes_attention(ranks: Ranks) -> None:
    """As their gradients are complete by then; a dense layer has one part."""
    layout, words = Layout(data=4, expert=2, zero=2), ("model.expert_every=2", "parallel.overlap=false")
    config = tiny(*WORDS, *words, *parallel_keys(layout))
    schedule, parts = plan_stages(config, layout).schedule, plan_stages(config, layout).of(0)
    stage = StageParameters.of_run(config, layout, layout.coordinates(0), parts, schedule.reduce_each)
    listed = [str(op) for op in Expansion(stage, None, schedule.turns).step(schedule.actions[0], one_by_one=True)]
    first = listed.index("B layers.1 OUTPUT of half 1, micro-batch 0")
    assert [op.partition(" (")[0] for op in listed[first : listed.index("UPDATE")]] == [
        *(f"B layers.1 {part} of half {half}, micro-batch 0" for part in ("OUTPUT", "EXPERTS") for half in (1, 0)),
        *("REDUCE flat parameter 3", "WAIT_REDUCE flat parameter 3"),
        *(f"B layers.1 ATTENTION of half {half}, micro-batch 0" for half in (1, 0)),
        *("REDUCE flat parameter 2", "WAIT_REDUCE flat parameter 2"),
        *(f"B layers.0 OUTPUT of half {half}, micro-batch 0" for half in (1, 0)),
        *("REDUCE flat parameter 1", "WAIT_REDUCE flat parameter 1"),
        "B embedding, micro-batch 0",
        *("REDUCE flat parameter 0", "WAIT_REDUCE flat parameter 0"),
    ]
    ranks.run(4, trained, layout, *words)


def refused(rank: int, world: int, turns: Sequence[Turn], also_backward: bool) -> str:
    """What the check says if its list has other turns than the layers take, or the same ones in both passes."""
    trainer, batches = small_trainer(Layout(data=2, expert=2), *WORDS)
    changed = (
        {"_backward_turns": lambda self, _, module, flats: self._turns.get(module, (None,))} if also_backward else {}
    )
    assert trainer.check is not None
    trainer.check.follow(replace(trainer.stages.schedule, turns=tuple(turns)))
    with replaced_here(Expansion, **changed), pytest.raises(LocalError) as error:
        trainer.train_step(batches)
    return str(error.value)


@pytest.mark.parametrize(
    ("turns", "also_backward", "said"),
    [
        (APART, False, "F layers.0 ATTENTION of half 1, micro-batch 0, expected F layers.0 EXPERTS of half 0, micro"),
        (OVERLAPPED, True, "B layers.2 OUTPUT of half 1, micro-batch 0, expected B layers.2 OUTPUT of half 0, micro"),
    ],
)
def test_a_turn_that_is_not_the_next_one_of_the_list_ends_the_run(
    ranks: Ranks, turns: Sequence[Turn], also_backward: bool, said: str
) -> None:
    for message in ranks.run(2, refused, turns, also_backward):
        assert said in message
