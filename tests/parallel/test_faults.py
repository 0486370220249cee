"""Which rank had a gradient that is not finite, and which one is slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pangu.collectives.point_to_point import Transfer
from pangu.pipeline.runner import Runner
from pangu.schedule.actions import Action
from pangu.topology.layout import Layout
from pangu.topology.recorder import ActiveRecording, Recorder
from pangu.training.device_checks import find_stragglers
from pangu.training.faults import not_finite
from pangu.training.step import Trainer
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks, replaced_here

NAMES = ("layers.1.attention.query.weight", "layers.0.mlp.up.weight")
"""In the order of backward; both on the first of two stages."""


def spoil(trainer: Trainer, name: str, value: float) -> None:
    """Let one element of a tensor's gradient be `value` in this rank's second micro-batch."""
    places = (
        (unit, place) for unit in trainer.parameters.flat_parameters for found, place in unit.tensors if found == name
    )
    unit, place = next(places)
    parameter, span = next(
        (parameter, span) for parameter, span in unit.parameters if span.start <= place.start < span.stop
    )
    micro_batches = iter(range(100))

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if next(micro_batches) == 1:
            gradient.view(-1)[place.start - span.start] = value
        return gradient

    parameter.register_hook(hook)


def spoiled(rank: int, world: int, layout: Layout, culprit: int) -> list[list[str]]:
    """What three steps say, in the second of which two gradients of one rank are not finite in one micro-batch."""
    trainer, batches = small_trainer(layout, *OVERRIDES, "batch.micro_size=1")
    results = [trainer.train_step(batches)]
    before = [shard.main.clone() for shard in trainer.parameters.shards]
    if rank == culprit:
        for name, value in zip(NAMES, (torch.inf, torch.nan), strict=True):
            spoil(trainer, name, value)
    results.append(trainer.train_step(batches))
    assert all(torch.equal(shard.main, old) for shard, old in zip(trainer.parameters.shards, before, strict=True))
    results.append(trainer.train_step(batches))
    assert [result.skipped for result in results] == [False, True, False]
    return [not_finite(result.norms) for result in results]


@pytest.mark.parametrize(
    ("layout", "culprit"),
    [
        (Layout(), 0),
        (Layout(data=2), 1),
        (Layout(data=2, zero=1), 0),
        (Layout(data=2, zero=2), 1),
        (Layout(data=2, zero=3), 1),
        (Layout(tensor=2, sequence=True), 1),
        (Layout(tensor=2, data=2, zero=1), 2),
        (Layout(pipeline=2, data=2, zero=2), 1),
    ],
    ids=str,
)
def test_the_rank_and_its_tensors_are_named(ranks: Ranks, layout: Layout, culprit: int) -> None:
    for rank, answer in enumerate(ranks.run(layout.world, spoiled, layout, culprit)):
        assert answer == [[], list(NAMES) if rank == culprit else [], []]


class At(NamedTuple):
    """A moment of a clock of ours."""

    seconds: float

    def synchronize(self) -> None:
        """Over at once."""

    def seconds_since(self, earlier: At) -> float:
        return self.seconds - earlier.seconds


def slow(rank: int, world: int, layout: Layout, culprit: int) -> dict[int, float]:
    """The slow ranks of a step by a clock of its own: chunks take as long as their FLOPs say, 3 times as long on one
    rank, and every message or collective that is waited for takes 10 times as long as a step."""
    trainer, batches = small_trainer(layout, *OVERRIDES, "batch.micro_size=1", "faults.straggler_every=1")
    expected = trainer.stages.durations.per_chunk(len(trainer.stages.schedule.stage_of))
    clock = [0.0]

    def taking(method: str) -> Any:
        original = getattr(Runner, method)

        def call(self: Runner, action: Action, *more: Any) -> Any:
            result = original(self, action, *more)
            clock[0] += expected[action.kind][action.chunk] * (3 if rank == culprit else 1)
            return result

        return replaced_here(Runner, **{method: call})

    def wait(self: Transfer) -> Any:
        clock[0] += 1e12
        return original_wait(self)

    def watched(self: Recorder, axis: str, work: Any, read: Any) -> Any:
        def wait() -> Any:
            clock[0] += 1e12
            return work.wait()

        return original_watched(self, axis, SimpleNamespace(wait=wait), read)

    original_wait, original_watched = Transfer.wait, Recorder.watched
    now = replaced_here(ActiveRecording, _now=lambda self: At(clock[0]))
    waits = replaced_here(Transfer, wait=wait), replaced_here(Recorder, watched=watched)
    with now, taking("_forward"), taking("_backward"), waits[0], waits[1]:
        return find_stragglers(trainer, batches, 2.0)


@pytest.mark.parametrize(
    "layout",
    [Layout(data=2), Layout(data=2, zero=3), Layout(pipeline=2), Layout(pipeline=2, data=2, zero=1)],
    ids=str,
)
def test_a_slow_rank_is_found_and_those_that_wait_for_it_are_not(ranks: Ranks, layout: Layout) -> None:
    for answer in ranks.run(layout.world, slow, layout, 1):
        assert answer == {1: pytest.approx(3.0)}
