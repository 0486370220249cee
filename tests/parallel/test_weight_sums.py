"""A bit that is turned over in a weight of one rank is found in the next step; equal copies are never reported."""

from __future__ import annotations

import random
import socket
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from pangu.data.batch import make_batch
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.replicas import find_weight_difference
from pangu.training.step import StepResult, Trainer
from pangu.zero.unshard import Unsharder
from pangu.zero.weight_sums import sum_of_bits
from tests.configs import tiny
from tests.parallel.harness import parallel_keys
from tests.threads import Ranks, replaced_here

VERIFIED = ("faults.verify_weights=true", "lr_schedule.warmup_steps=1")


def make(layout: Layout, words: tuple[str, ...]) -> Trainer:
    experts = ["model.experts=12"] * layout.splits_experts
    config = tiny(*parallel_keys(layout), *VERIFIED, *words, *experts)
    return Trainer(config, Mesh.connect(layout, torch.device("cpu")))


def step(trainer: Trainer) -> StepResult:
    config, layout = trainer.config, trainer.mesh.layout
    rows = 2 * layout.data * trainer.stages.schedule.micro_batches
    tokens = np.arange(rows * 17).reshape(rows, 17) % 101
    mine = range(trainer.mesh.at.data, rows, layout.data)
    return trainer.train_step(
        [make_batch(tokens[[i, i + layout.data]], [i, i + layout.data], config.data.packing) for i in mine[::2]]
    )


def told(rank: int, world: int, layout: Layout, culprit: int, kind: str, words: tuple[str, ...]) -> list[str | None]:
    """What each of four steps finds; before the third one, a bit is turned over on one rank and back after it: where
    weights are kept, or at stage 3, where they are not, in what arrives."""
    trainer = make(layout, words)
    table = trainer.parameters.stage.table
    flat, span = next(
        (flat, span)
        for flat in trainer.parameters.flat_parameters
        for at, span in flat.tensor_ranges(table)
        if (at.expert if kind == "expert" else at.shared if kind == "tied" else at.is_vector or kind == "any")
    )
    finish = Unsharder.finish

    def flip() -> None:
        values = flat.weights.data
        values.view(torch.int16 if values.element_size() == 2 else torch.int32)[span.stop - 1] ^= 1 << 3

    def finish_and_flip(self: Unsharder, given: Any) -> None:
        arrives = given in self.in_flight
        finish(self, given)
        if given is flat and arrives:
            flip()

    found: list[str | None] = []
    for number in range(4):
        wrong, stage3 = rank == culprit and number == 2, flat.sharding.stage == 3
        if wrong and not stage3:
            trainer.parameters.unsharder.wait()
            flip()
        with replaced_here(Unsharder, finish=finish_and_flip) if wrong and stage3 else nullcontext():
            sums = step(trainer).weight_sums
        found.append(None if sums is None else find_weight_difference(trainer, sums))
    return found


BF16 = ("precision=bf16",)
PAIR = "rank {} on H, rank {} on H ({} axis) from each other"


@pytest.mark.parametrize(
    ("layout", "culprit", "kind", "words", "differ"),
    [
        *((Layout(data=3, zero=stage), 1, "any", BF16, "rank 1 on H (replicas axis)") for stage in range(4)),
        *((Layout(data=2, tensor=2, zero=stage), 3, "any", (), PAIR.format(1, 3, "replicas")) for stage in range(4)),
        *((Layout(data=2, pipeline=2, zero=stage), 2, "any", (), PAIR.format(2, 3, "replicas")) for stage in range(4)),
        (Layout(data=2, tensor=2, pipeline=2, zero=3), 6, "any", BF16, PAIR.format(4, 6, "replicas")),
        (Layout(tensor=2, sequence=True), 1, "vector", BF16, PAIR.format(0, 1, "tensor")),
        (Layout(pipeline=2), 1, "tied", (), PAIR.format(0, 1, "ends")),
        (Layout(data=4, expert=2, zero=3), 3, "expert", BF16, PAIR.format(1, 3, "expert_replicas")),
        (Layout(data=4, zero=3, zero_group=2), 2, "any", BF16, "rank 2 on H (replicas axis) from the other copies"),
        (Layout(data=2, context=2, zero=2), 3, "any", (), "rank 3 on H (replicas axis) from the other copies"),
        (Layout(data=3, zero=3), 2, "any", (*BF16, "memory.offload=[optimizer,parameters]"), "rank 2 on H (replicas"),
    ],
    ids=str,
)
def test_the_rank_with_the_wrong_weight_is_named_in_its_step(
    ranks: Ranks, layout: Layout, culprit: int, kind: str, words: tuple[str, ...], differ: str
) -> None:
    for first, second, wrong, _ in ranks.run(layout.world, told, layout, culprit, kind, words):
        assert first is second is None
        assert wrong is not None
        assert differ.replace("H", socket.gethostname()) in wrong


def repaired(rank: int, world: int) -> list[bool]:
    """Whether each of three steps finds a difference: a weight that only computes is made again by the update."""
    trainer = make(Layout(data=2, zero=2), BF16)
    found = [step(trainer).weight_sums is not None]
    if rank == 1:
        trainer.parameters.unsharder.wait()
        trainer.parameters.flat_parameters[0].weights.data.view(torch.int16)[0] ^= 1
    return [*found, *(step(trainer).weight_sums is not None for _ in range(2))]


def test_a_weight_that_is_made_again_is_no_longer_reported(ranks: Ranks) -> None:
    assert ranks.run(2, repaired) == [[False, True, False]] * 2


def campaign(rank: int, world: int, steps: int) -> list[tuple[int | None, str | None]]:
    """The rank on which a bit of a drawn weight is turned over before each step, if any, and what the step finds; the
    update makes the weight again."""
    trainer, chance = make(Layout(data=world, zero=2), BF16), random.Random(0)
    flats, found = trainer.parameters.flat_parameters, list[tuple[int | None, str | None]]()
    for _ in range(steps):
        culprit = chance.randrange(world) if chance.random() < 0.3 else None
        flat = chance.choice(flats)
        place, bit = chance.randrange(flat.numel), chance.randrange(7)  # of the mantissa: no step is skipped
        if rank == culprit:
            trainer.parameters.unsharder.wait()
            flat.weights.data.view(torch.int16)[place] ^= 1 << bit
        sums = step(trainer).weight_sums
        found.append((culprit, None if sums is None else find_weight_difference(trainer, sums)))
    return found


@pytest.mark.parametrize("steps", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_every_turned_bit_is_found_and_nothing_else(ranks: Ranks, steps: int) -> None:
    for answers in ranks.run(3, campaign, steps):
        assert {culprit for culprit, _ in answers} == {None, 0, 1, 2}
        for culprit, words in answers:
            assert (words is None) == (culprit is None)
            assert words is None or f": rank {culprit} on {socket.gethostname()} (replicas axis)" in words


def losses(rank: int, world: int, words: tuple[str, ...]) -> list[tuple[float, float]]:
    trainer = make(Layout(data=2, zero=3), words)
    return [(result.loss, result.grad_norm) for result in (step(trainer) for _ in range(3))]


def test_the_comparison_changes_no_bit_of_a_step(ranks: Ranks) -> None:
    assert ranks.run(2, losses, ()) == ranks.run(2, losses, ("faults.verify_weights=false",))


def order(rank: int, world: int) -> list[str]:
    """What happens in a step and in a recheck, in turn."""
    trainer, events = make(Layout(data=world, zero=1), ()), list[str]()
    sums, gradients = trainer.parameters.unsharder.sums, trainer.parameters.gradients
    assert sums is not None
    for owner, name in ((sums, "add_rest"), (gradients, "finish"), (sums, "finish_step")):
        call = getattr(owner, name)
        setattr(owner, name, lambda name=name, call=call: (events.append(name), call())[1])
    step(trainer)
    trainer.digest(make_batch(np.arange(17)[None] % 101, [0], trainer.config.data.packing))
    return [*events, f"{len(gradients.norms)} norms"]


def test_weights_are_summed_while_gradients_are_reduced_and_not_for_a_recheck(ranks: Ranks) -> None:
    assert ranks.run(2, order) == [["add_rest", "finish", "finish_step", "finish", "0 norms"]] * 2


def test_ranks_that_differ_alike_are_found() -> None:
    """Of any number: no factors but those of all ranks add up to 0."""
    for size in (2, 3, 4, 7):
        factors = [*range(1, size), -size * (size - 1) // 2]
        assert sum(factors) == 0
        assert all(
            sum(factor for place, factor in enumerate(factors) if members >> place & 1)
            for members in range(1, 2**size - 1)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 7, 64, 67])
def test_every_bit_changes_the_sum(dtype: torch.dtype, length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    whole = int(sum_of_bits(values))
    for place in range(length):
        for bit in (0, 5, 8 * values.element_size() - 2):
            bits[place] ^= 1 << bit
            assert int(sum_of_bits(values)) != whole
            bits[place] ^= 1 << bit
    assert int(sum_of_bits(values)) == whole
