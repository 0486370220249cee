"""All replicas compute one micro-batch alike: equal devices are never reported, and one that errs is named."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any

import pytest
import torch

from pangu.data.batch import Batch
from pangu.topology.layout import Layout
from pangu.training.device_checks import DeviceChecks, coupled_replicas, wrong_ranks
from pangu.training.process import Heartbeat
from pangu.training.step import Trainer
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks

RECHECKED = (*OVERRIDES, "batch.micro_size=1", "train.deterministic=true", "faults.recheck=2")
FAST = (
    *("model.layers=2", "model.dropout=0", "model.attention_dropout=0", "model.attention=sdpa"),
    *("parallel.bucket_mib=25", "batch.global_size=3", "faults.recheck=4"),
)
CHANCE = 0.3
KINDS = ("gradient", "device", "weight")
"""Errors of a rank: weights of its own exist at the lower ZeRO stages only."""
LAYOUTS = (
    (Layout(data=3), ()),
    (Layout(data=3, zero=1), ("precision=bf16",)),
    (Layout(data=2, zero=2), ("model.dropout=0.1",)),
    (Layout(data=3, zero=3), ("model.dropout=0.1", "precision=bf16")),
    (Layout(data=2, tensor=2, sequence=True, zero=1), ()),
    (Layout(data=2, pipeline=2, zero=2), ("model.dropout=0.1", "train.check_step=true")),
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


def until_found(checks: DeviceChecks, batches: list[Batch], kind: str, errs: bool, seed: int) -> tuple[int, int, str]:
    """Train from the beginning, and on one rank turn over bits, until that is found.

    `gradient`: in a share of the backward passes; `weight`: in a share of the steps, in its own copy, where they stay;
    `device`: in all backward passes from a step on, with which that begins in a share of the steps.
    Returns the first step with an error that a recheck can see (on that rank), the step that finds it, and the text.
    """
    trainer, drawn, error, step = checks._trainer, random.Random(seed), 0, 0
    trainer.start_over()
    weights = trainer.parameters.flat_parameters[-1].weights.data
    with ExitStack() as stack:
        flips = stack.enter_context(flipping(trainer, CHANCE if errs and kind == "gradient" else 0.0, seed))
        while True:
            step += 1
            if errs and kind == "device" and not error and drawn.random() < CHANCE:
                stack.enter_context(flipping(trainer, 1.0, seed))
                error = step
            if errs and kind == "weight" and drawn.random() < CHANCE:
                place = drawn.choice(weights.nonzero().flatten().tolist())  # in a 0 it would be too small to matter
                weights.view(torch.int32)[place] ^= 1 << drawn.randrange(16, 20)
                error = error or step
            before = flips[0]
            checks.before_step(batches)
            error = error or step * (flips[0] > before)
            if (found := checks.find(trainer.train_step(batches))) is not None:
                return error, step, found[0]


def losses(checks: DeviceChecks, batches: list[Batch], steps: int) -> list[float]:
    """Of steps without an error, from the beginning on."""
    checks._trainer.start_over()
    of_steps = list[float]()
    for _ in range(steps):
        checks.before_step(batches)
        result = checks._trainer.train_step(batches)
        assert checks.find(result) is None, "false alarm"
        of_steps.append(result.loss + result.grad_norm)
    return of_steps


def judged(checks: DeviceChecks, batches: list[Batch], is_last: bool) -> list[tuple[str, int | None]]:
    """Verdicts on three spikes: of the data, of a loss that the last rank gets wrong once, of one that always errs."""
    trainer, verdicts = checks._trainer, list[tuple[str, int | None]]()
    trainer.start_over()
    trainer.loss_limit = 0.0
    for cause in ("data", "once", "always"):
        with flipping(trainer, 1.0 if is_last and cause == "always" else 0.0, 0):
            trainer.forward_backward(batches)
            if is_last and cause == "once":
                assert trainer._loss is not None
                trainer._loss = trainer._loss * 2
            checks.computed = batches, trainer.config
            result = trainer.read(trainer.update())
            trainer.forward_backward(batches)  # as a run does before it reads the result
            verdicts.append(checks.diagnose("spike", result))
    return verdicts


def found_after_continuing(rank: int, world: int) -> tuple[str, int] | None:
    """Fault that a run finds which continues from step 5, with a recheck in every second step."""
    trainer, batches = small_trainer(Layout(data=world), *RECHECKED, f"batch.global_size={2 * world}")
    trainer.step = 5
    checks = DeviceChecks(trainer, Heartbeat(None))
    for _ in range(2):
        with flipping(trainer, float(rank == 1), 0):
            checks.before_step(batches)
        result = trainer.train_step(batches)
    return checks.find(result)


def test_what_a_run_continues_from_is_intact_only_if_it_was_rechecked(ranks: Ranks) -> None:
    assert [found and found[1] for found in ranks.run(3, found_after_continuing)] == [4, 4, 4]


def campaign(
    rank: int, world: int, layout: Layout, words: tuple[str, ...], steps: int, trials: Sequence[tuple[str, int]]
) -> Any:
    """Whether rechecks change a step, the faults found in each trial while rank `seed % world` errs, and verdicts."""
    trainer, batches = small_trainer(layout, *RECHECKED, f"batch.global_size={2 * layout.data}", *words)
    checks = DeviceChecks(trainer, Heartbeat(None))
    checks.rechecks = False
    without = losses(checks, batches, 2)
    checks.rechecks = True
    alike = losses(checks, batches, steps)[:2] == without
    found = [until_found(checks, batches, kind, rank == seed % world, seed) for kind, seed in trials]
    return alike, found, judged(checks, batches, rank == world - 1)


def assert_found(answers: list[Any], trials: Sequence[tuple[str, int]], every: int) -> dict[str, list[int]]:
    """Only the rank that errs is named, in the recheck that sees its error; a spike is of the data if it comes again.

    Returns the steps of the trials, by kind.
    """
    steps: dict[str, list[int]] = {}
    for number, (kind, seed) in enumerate(trials):
        culprit = seed % len(answers)
        error, step, text = answers[culprit][1][number]
        assert all(answer[1][number][1:] == (step, text) for answer in answers)
        assert text.startswith(f"replicas compute different bits (faults.recheck): rank {culprit} on ")
        assert text.count("rank ") == 1
        assert 0 < error <= step < error + (1 if kind == "gradient" else every)
        steps.setdefault(kind, []).append(step)
    same = "spike; recomputed in place and on all replicas with the same bits, so no device is at fault"
    for alike, _, (data, (once, _), (always, _)) in answers:
        assert alike
        assert data == (same, None)
        assert f"recomputed with different bits (faults.recheck): rank {len(answers) - 1} on " in once
        assert f" (faults.recheck): rank {len(answers) - 1} on " in always
        assert once.count("rank ") == always.count("rank ") == 1
    return steps


@pytest.mark.parametrize(("layout", "words"), LAYOUTS, ids=str)
def test_only_the_rank_that_errs_is_found(ranks: Ranks, layout: Layout, words: tuple[str, ...]) -> None:
    """A recheck of equal devices finds nothing and changes no bit of a step; a spike is of a device or of the data."""
    trials = [(kind, layout.world - 1) for kind in KINDS[: 3 if layout == Layout(data=3) else 1]]
    assert_found(ranks.run(layout.world, campaign, layout, words, 3, trials), trials, 2)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "words"), [LAYOUTS[0], (Layout(data=3, zero=2), ("precision=bf16",))], ids=str)
def test_no_false_alarm_in_10_000_steps_and_100_of_100_ranks_are_right(
    ranks: Ranks, layout: Layout, words: tuple[str, ...]
) -> None:
    """Within R steps of an error that stays, 1 / p + R - 1 in the mean; the mean number of rechecks that are needed to
    see one that comes and goes is 1 / p, so that R (1 / p - 1) + 1 steps are, the first one being a recheck."""
    every = 4
    kinds = KINDS if layout == Layout(data=3) else KINDS[:2]
    trials = [(kind, seed) for kind in kinds for seed in range(100)]
    steps = assert_found(ranks.run(layout.world, campaign, layout, (*words, *FAST), 5000, trials), trials, every)
    print({kind: fmean(of_kind) for kind, of_kind in steps.items()})
    deviation = (1 - CHANCE) ** 0.5 / CHANCE / 10  # of the mean of 100 numbers of tries
    assert abs((fmean(steps["gradient"]) - 1) / every + 1 - 1 / CHANCE) <= 3 * deviation
    assert all(fmean(steps[kind]) <= 1 / CHANCE + 3 * deviation + every - 1 for kind in kinds[1:])


def test_the_verdict_needs_a_most_common_answer() -> None:
    two, four = Layout(data=2), Layout(data=4, expert=2)
    assert wrong_ranks(two, [[1, 1]]) == []
    assert wrong_ranks(two, [[1, 2], [1, 1]]) == [1]
    assert wrong_ranks(two, [[1, 2], [1, 3]]) == [1]
    assert wrong_ranks(two, [[1, 2], [1, 2]]) == [0, 1]
    assert wrong_ranks(Layout(data=3), [[1, 2, 1], [1, 2, 1]]) == [1]
    assert (coupled_replicas(four), coupled_replicas(Layout(data=2, tensor=2, expert=2, expert_tensor=1))) == (2, 1)
    assert wrong_ranks(four, [[1, 2, 1, 2]]) == []
