"""All replicas compute one micro-batch alike: equal devices are never reported, and one that errs is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pangu.topology.layout import Layout
from pangu.training.process import Heartbeat
from pangu.training.recheck import DeviceChecks, coupled_replicas, wrong_ranks
from pangu.training.step import Trainer
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks

RECHECKED = (*OVERRIDES, "batch.micro_size=1", "batch.global_size=12", "train.deterministic=true", "faults.recheck=1")
LAYOUTS = (
    (Layout(data=3), ()),
    (Layout(data=3, zero=1), ("precision=bf16",)),
    (Layout(data=2, zero=2), ("model.dropout=0.1",)),
    (Layout(data=3, zero=3), ("model.dropout=0.1", "precision=bf16")),
    (Layout(data=2, tensor=2, sequence=True, zero=1), ()),
    (Layout(data=2, pipeline=2, zero=2), ("model.dropout=0.1",)),
    (Layout(data=2, pipeline=2, virtual_stages=2, zero=3), ("parallel.schedule=interleaved", "model.layers=4")),
    (Layout(data=2, context=2, zero=3), ()),
    (Layout(data=4, expert=2, zero=2), ("model.experts=4",)),
)


@contextmanager
def flipping(trainer: Trainer, chance: float, seed: int) -> Iterator[list[int]]:
    """Turn over one bit of a gradient of this rank in a share of its backward passes; count them."""
    drawn, flips = random.Random(seed), [0]
    parameter = next(one for flat in trainer.parameters.trained for one, _ in flat.parameters if one.dim() == 1)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if drawn.random() >= chance:
            return gradient
        flips[0] += 1
        gradient = gradient.clone()
        bits = gradient.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient.element_size()])
        bits[drawn.randrange(len(bits))] ^= 1 << drawn.randrange(6)
        return gradient

    handle = parameter.register_hook(hook)
    yield flips
    handle.remove()


def rechecked(
    rank: int, world: int, layout: Layout, words: tuple[str, ...], steps: int, culprit: int, seed: int
) -> tuple[Any, ...]:
    """What is found in steps without an error, whether their losses are those without rechecks, and what is found
    while a rank errs: number of rechecks, flips on this rank until then, and the texts of a recheck and of a spike."""
    trainer, batches = small_trainer(layout, *RECHECKED, *words)
    checks, found, losses = DeviceChecks(trainer, Heartbeat(None)), list[Any](), list[float]()
    for _ in range(steps):
        checks.before_step(batches)
        result = trainer.train_step(batches)
        found.append(checks.find(result))
        losses.append(result.loss + result.grad_norm)
    without, _ = small_trainer(layout, *RECHECKED, *words)
    alike = all((one := without.train_step(batches)).loss + one.grad_norm == loss for loss in losses[:2])
    checks.batches = batches
    found.append(checks.judge("spike", result)[1])
    with flipping(trainer, 0.3 if rank == culprit else 0.0, seed) as flips:
        number = 0
        while checks._found is None and number < 60:
            checks.before_step(batches)
            trainer.step += 1  # another replica's micro-batch each time
            number += 1
        count = flips[0]
    with flipping(trainer, 1.0 if rank == culprit else 0.0, seed):
        spike, intact = checks.judge("spike", result)
    assert intact is not None
    return found, alike, number, count, [(checks._found or [""])[0], spike.removeprefix("spike; ")]


def assert_right(answers: list[Any], culprit: int) -> None:
    assert [flips > 0 for *_, flips, _ in answers] == [rank == culprit for rank in range(len(answers))]
    for found, alike, number, _, texts in answers:
        assert alike
        assert not any(found)
        assert number == answers[0][2]
        for text in texts:
            assert text.startswith(f"replicas compute other bits (faults.recheck): rank {culprit} on ")
            assert text.count("rank ") == 1


@pytest.mark.parametrize(("layout", "words"), LAYOUTS, ids=str)
def test_only_the_rank_that_errs_is_found(ranks: Ranks, layout: Layout, words: tuple[str, ...]) -> None:
    """At its first wrong bit. A recheck of equal devices finds nothing, and changes no bit of a step."""
    culprit = layout.world - 1
    assert_right(ranks.run(layout.world, rechecked, layout, words, 2, culprit, 0), culprit)


@pytest.mark.parametrize(("times", "steps"), [pytest.param(100, 100, marks=pytest.mark.long)])
def test_no_false_alarm_in_10_000_steps_and_100_of_100_ranks_are_right(ranks: Ranks, times: int, steps: int) -> None:
    for seed in range(times):
        words = ("model.dropout=0.1",)
        assert_right(ranks.run(3, rechecked, Layout(data=3, zero=2), words, steps, seed % 3, seed), seed % 3)


def test_the_verdict_needs_a_most_common_answer() -> None:
    two, four = Layout(data=2), Layout(data=4, expert=2)
    assert wrong_ranks(two, [[1, 1]]) == []
    assert wrong_ranks(two, [[1, 2], [1, 1]]) == [1]
    assert wrong_ranks(two, [[1, 2], [1, 3]]) == [1]
    assert wrong_ranks(two, [[1, 2], [1, 2]]) == [0, 1]
    assert wrong_ranks(Layout(data=3), [[1, 2, 1], [1, 2, 1]]) == [1]
    assert (coupled_replicas(four), coupled_replicas(Layout(data=2, tensor=2, expert=2, expert_tensor=1))) == (2, 1)
    assert wrong_ranks(four, [[1, 2, 1, 2]]) == []
