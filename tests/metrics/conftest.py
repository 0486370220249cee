"""One record, with figures that can be told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pangu.metrics.record import StepRecord

RECORD = StepRecord(
    step=120,
    tokens=7_864_320,
    loss=5.123456789012345,
    lr=1e-4,
    grad_norm=0.9125,
    step_time_s=2.0,
    tokens_per_s=12_345.0,
    tflops_per_device=119.2,
    mfu=0.382,
    peak_memory_gib=23.1,
    skipped=0,
    loss_scale=None,
)


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    """Makes a record that differs from RECORD in the given fields."""

    def make(**fields: Any) -> StepRecord:
        return replace(RECORD, **fields)

    return make
