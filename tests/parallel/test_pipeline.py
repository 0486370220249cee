"""Pipeline parallelism does not change the maths, whatever the schedule."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, compare, one_process, small_trainer, train_layout
from tests.spawn import Pool

MODEL = (*OVERRIDES, "model.hidden=16", "model.heads=4", "batch.micro_size=1")
FP64 = (*MODEL, "precision=fp64")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "breadth_first": 2, "zb_h1": 1, "zb_v": 2}
"""Schedule -> chunks per stage."""
FACTORS: tuple[tuple[Any, ...], ...] = (
    tuple(SCHEDULES),
    tuple(range(1, 9)),  # micro-batches
    (2, 4),  # stages
    ((1, False), (2, False), (2, True)),  # tensor-parallel ranks, sequence parallelism
    ("true", "false"),  # tied head
    ("pangu", "gpt"),
)


def pairs(case: tuple[Any, ...]) -> set[Any]:
    """All pairs of values of two factors, each with its factor's place."""
    return set(combinations(enumerate(case), 2))


def covering_sample() -> list[tuple[Any, ...]]:
    """Every schedule with every number of micro-batches, each with those of the other values that make many new pairs
    for few processes."""
    covered: set[Any] = set()
    cases = []

    def worth(case: tuple[Any, ...]) -> float:
        _, _, stages, (tensor, _), *_ = case
        return len(pairs(case) - covered) - 0.3 * stages * tensor

    for first in product(*FACTORS[:2]):
        cases.append(max((first + rest for rest in product(*FACTORS[2:])), key=worth))
        covered |= pairs(cases[-1])
    return cases


def test_the_sample_has_every_pair_of_values() -> None:
    assert set().union(*map(pairs, covering_sample())) == set().union(*map(pairs, product(*FACTORS)))


@pytest.mark.parametrize(("schedule", "micro_batches", "stages", "tensor", "tied", "kind"), covering_sample(), ids=str)
def test_every_schedule_gives_the_same_run_in_float64(
    pool: Pool, schedule: str, micro_batches: int, stages: int, tensor: tuple[int, bool], tied: str, kind: str
) -> None:
    """3 steps; 1e-12 relative, as for replicas."""
    overrides = (
        *FP64,
        f"model.kind={kind}",
        f"model.tied_head={tied}",
        f"model.layers={SCHEDULES[schedule] * stages + 1}",
        f"batch.global_size={micro_batches}",
    )
    size, sequence = tensor
    layout = Layout(tensor=size, pipeline=stages, virtual=SCHEDULES[schedule], sequence=sequence)
    ours = pool.run(layout.world, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}")[0]
    compare(ours, one_process(3, *overrides), 1e-12)


RELATIVE = "model.positions=relative model.relative_buckets=6 model.relative_distance=9"
VARIANTS = [
    # layout, schedule, kind of model, what else the model is, what only the layout has
    (Layout(pipeline=2, data=2), "1f1b", "pangu", "", ""),
    (Layout(pipeline=2, data=2, virtual=2), "zb_v", "gpt", "", ""),
    (Layout(pipeline=4), "1f1b", "pangu", RELATIVE, ""),  # one table for all stages
    (Layout(pipeline=2, virtual=2), "zb_v", "gpt", RELATIVE, ""),
    (Layout(pipeline=2, tensor=2, sequence=True), "zb_h1", "pangu", RELATIVE, ""),
    (Layout(pipeline=2), "1f1b", "gpt", "model.residual_scores=true", ""),  # a message is two tensors
    (Layout(pipeline=2, tensor=2, virtual=2), "interleaved", "pangu", f"model.residual_scores=true {RELATIVE}", ""),
    (Layout(pipeline=2, virtual=2), "zb_v", "gpt", "model.residual_scores=true", ""),
    (Layout(pipeline=2), "1f1b", "pangu", "", "parallel.layers=[1,5]"),
    (Layout(pipeline=4), "zb_h1", "gpt", "", "parallel.layers=[1,1,3,1]"),
    (Layout(pipeline=2, virtual=2), "breadth_first", "pangu", "", "parallel.layers=[3,1,1,1]"),
    (Layout(pipeline=2), "1f1b", "gpt", "", "memory.recompute=full"),
    (Layout(pipeline=2), "zb_h1", "pangu", "", "memory.recompute=selective memory.offload=[activations]"),
    (Layout(pipeline=2, virtual=2), "zb_v", "gpt", "", "memory.recompute=1 loss.chunk=5"),
    (Layout(pipeline=2, tensor=2, sequence=True), "1f1b", "pangu", "", "parallel.overlap_chunks=3"),
    (Layout(pipeline=2, tensor=2, virtual=2), "zb_v", "gpt", "", "parallel.overlap_chunks=3 memory.recompute=full"),
    (Layout(pipeline=2), "gpipe", "pangu", "model.positions=rope model.kv_heads=2 model.norm_placement=post", ""),
]


@pytest.mark.parametrize(("layout", "schedule", "kind", "model", "more"), VARIANTS, ids=str)
def test_what_else_a_stage_does_gives_the_same_run_in_float64(
    pool: Pool, layout: Layout, schedule: str, kind: str, model: str, more: str
) -> None:
    overrides = (*FP64, f"model.kind={kind}", "model.layers=6", "batch.global_size=4", *model.split())
    ours = pool.run(layout.world, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}", *more.split())
    compare(ours[0], one_process(3, *overrides), 1e-12)


@pytest.mark.parametrize(
    ("precision", "rounding", "schedule"),
    [("bf16", 2**-9, "1f1b"), ("fp16", 2**-12, "zb_v"), ("fp32", 2**-25, "zb_h1")],
)
def test_narrow_formats_follow_one_process(pool: Pool, precision: str, rounding: float, schedule: str) -> None:
    """The same operations on the same numbers: bit for bit the first loss. Gradients of a table that two stages share
    are added in another order, which moves later losses by a few roundings of the weights."""
    overrides = (*MODEL, f"precision={precision}", "model.layers=5", "batch.global_size=4")
    layout = Layout(pipeline=2, virtual=SCHEDULES[schedule])
    ours = pool.run(2, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}")[0]["results"]
    one = one_process(3, *overrides)["results"]
    assert ours[0].loss == one[0].loss
    for mine, reference in zip(ours, one, strict=True):
        assert mine.loss == pytest.approx(reference.loss, rel=4 * rounding)
        assert not mine.skipped


def skips(rank: int, world: int, layout: Layout, steps: int, *overrides: str) -> list[tuple[bool, float]]:
    """Of every step whether it was skipped, and its loss scale."""
    trainer, batches = small_trainer(layout, *overrides)
    results = [trainer.train_step(batches) for _ in range(steps)]
    return [(result.skipped, result.loss_scale) for result in results]


def test_all_stages_skip_the_step_of_an_overflow(pool: Pool) -> None:
    """A scale at which fp16 overflows is halved by every stage until it does not."""
    overrides = (*MODEL, "precision=fp16", "precision.loss_scale.initial=1e6", "model.layers=5", "batch.global_size=2")
    first, last = pool.run(2, skips, Layout(pipeline=2), 6, *overrides)
    assert first == last == skips(0, 1, Layout(), 6, *overrides)
    assert {skipped for skipped, _ in first} == {True, False}
