"""ZeRO does not change the maths: not a bit of it."""

from __future__ import annotations

import pytest

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, compare, train_layout
from tests.spawn import Pool

MODEL = (*OVERRIDES, "batch.micro_size=1")


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_stage_gives_the_same_run_in_float64(pool: Pool, zero: int, optimizer: str) -> None:
    overrides = (*MODEL, "precision=fp64", f"optimizer={optimizer}")
    one = train_layout(0, 1, Layout(), 3, *overrides)
    compare(pool.run(2, train_layout, Layout(data=2, zero=zero), 3, *overrides)[0], one, 1e-12)
