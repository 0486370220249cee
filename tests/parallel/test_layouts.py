"""The layout does not change the maths: every pair of options, in some layout, equals one process.

The cases are covering arrays (`tests/covering.py`). In float64 all numbers of a run are compared to 1e-12: initial
weights bit for bit, losses, norms, every gradient of every step, the weights, the held-out loss, the logits of cached
generation. In narrow formats losses and norms are compared to a few roundings.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pangu.topology.layout import Layout
from pangu.training.step import StepResult
from tests.covering import Case, Cover, all_pairs, pairs_of
from tests.parallel.cases import FACTORS, FITS, devices, equals_one_process, fits, keys_of, layout_of, name_of, ways_of
from tests.parallel.harness import small_trainer
from tests.threads import Ranks

PRECISIONS = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2.5e-3}
"""Format -> tolerance of losses: 16 roundings of 2^-24, 5 of 2^-8 and of 2^-11."""
COVER = Cover(FACTORS, **FITS)
NARROW = Cover({"precision": tuple(PRECISIONS), **FACTORS}, **FITS, of="precision")


def test_every_pair_occurs_that_can() -> None:
    """In float64 those of all options, in each narrow format every value."""
    pairs = set().union(*map(pairs_of, COVER.cases))
    assert COVER.impossible == COVER.apart
    assert pairs == set(all_pairs(FACTORS)) - COVER.apart
    assert all(fits(case) for case in (*COVER.cases, *NARROW.cases))
    narrow = set().union(*map(pairs_of, NARROW.cases))
    choices = {(name, value) for name, values in FACTORS.items() for value in values}
    each = {frozenset({("precision", format), choice}) for format in PRECISIONS for choice in choices}
    assert each - NARROW.apart <= narrow
    assert {frozenset({("matmul", "fp8"), ("precision", format)}) for format in ("fp32", "fp16")} >= each & NARROW.apart
    assert {devices(case) for case in COVER.cases} >= {4, 6, 8}


def anything(case: Mapping[str, str]) -> bool:
    """No rule."""
    return True


def test_a_kept_array_is_not_taken_for_that_of_other_options() -> None:
    for values in (("1", "2"), ("2", "3")):
        cases = Cover({"one": values, "other": ("x",)}, anything, lambda case: 0).cases
        assert {case["one"] for case in cases} == set(values)


@pytest.mark.parametrize("case", COVER.cases, ids=name_of)
def test_every_pair_of_options_gives_the_same_run_in_float64(ranks: Ranks, case: Case) -> None:
    """1e-12 relative: sums of at most 96 products in another order, 1.1e-16 each. With fp8 the second step multiplies
    in it, of numbers that the layouts round alike: a difference of 1e-16 is the next one in fp8 once in 10^15 times."""
    equals_one_process(ranks, case)


def two_steps(rank: int, world: int, layout: Layout, *overrides: str) -> list[StepResult]:
    """The first batch, twice."""
    trainer, batches = small_trainer(layout, *overrides)
    return [trainer.train_step(batches) for _ in range(2)]


def follows_one_process(ranks: Ranks, layout: Layout, precision: str, model: tuple[str, ...], *own: str) -> None:
    """Partial sums are rounded, then added: losses within a few roundings, norms within ten times as many."""
    words = (*model, f"precision={precision}", *(["precision.loss_scale.initial=1024"] * (precision == "fp16")))
    tolerance = PRECISIONS[precision]
    ours: list[StepResult] = ranks.run(layout.world, two_steps, layout, *words, *own)[0]
    for mine, reference in zip(ours, two_steps(0, 1, Layout(), *words), strict=True):
        assert not mine.skipped
        assert mine.loss == pytest.approx(reference.loss, rel=tolerance)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=10 * tolerance)


@pytest.mark.parametrize("case", NARROW.cases, ids=name_of)
def test_every_option_follows_one_process_in_narrow_formats(ranks: Ranks, case: Case) -> None:
    model, own = keys_of(case)
    with ways_of(case):
        follows_one_process(ranks, layout_of(case), case["precision"], tuple(model), *own)
