"""Pipeline parallelism does not change the maths, whatever the schedule."""

from __future__ import annotations

import pytest

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, compare, train_layout
from tests.spawn import Pool

MODEL = (*OVERRIDES, "precision=fp64", "model.layers=5", "model.hidden=16", "model.heads=4", "batch.micro_size=1")


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("breadth_first", 2), ("zb_h1", 1), ("zb_v", 2)],
)
def test_every_schedule_gives_the_same_run_in_float64(
    pool: Pool, schedule: str, virtual: int, micro_batches: int, kind: str
) -> None:
    overrides = (*MODEL, f"model.kind={kind}", f"batch.global_size={micro_batches}")
    one = train_layout(0, 1, Layout(), 3, *overrides)
    layout = Layout(pipeline=2, virtual=virtual)
    compare(pool.run(2, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}")[0], one, 1e-12)
