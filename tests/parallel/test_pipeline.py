"""Pipelines in narrow formats; in float64 they are compared in `test_layouts.py`."""

from __future__ import annotations

import pytest

from pangu.topology.layout import Layout
from tests.parallel.cases import CHUNKS
from tests.parallel.harness import OVERRIDES, one_process, small_trainer, train_layout
from tests.threads import Ranks

MODEL = (*OVERRIDES, "model.hidden=16", "model.heads=4", "batch.micro_size=1")


@pytest.mark.parametrize(
    ("precision", "rounding", "schedule"),
    [("bf16", 2**-9, "1f1b"), ("fp16", 2**-12, "zb_v"), ("fp32", 2**-25, "zb_h1")],
)
def test_narrow_formats_follow_one_process(ranks: Ranks, precision: str, rounding: float, schedule: str) -> None:
    """The same operations on the same numbers: bit for bit the first loss. Gradients of a table that two stages share
    are added in another order, which moves later losses by a few roundings of the weights."""
    overrides = (*MODEL, f"precision={precision}", "model.layers=5", "batch.global_size=4")
    layout = Layout(pipeline=2, virtual_stages=CHUNKS[schedule])
    ours = ranks.run(2, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}")[0]["results"]
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


def test_all_stages_skip_the_step_of_an_overflow(ranks: Ranks) -> None:
    """A scale at which fp16 overflows is halved by every stage until it does not."""
    overrides = (*MODEL, "precision=fp16", "precision.loss_scale.initial=1e6", "model.layers=5", "batch.global_size=2")
    first, last = ranks.run(2, skips, Layout(pipeline=2), 6, *overrides)
    assert first == last == skips(0, 1, Layout(), 6, *overrides)
    assert {skipped for skipped, _ in first} == {True, False}
