from __future__ import annotations

import math
from typing import Any

import pytest

from pangu.metrics.meter import Meter, TimeLeft, perplexity
from pangu.metrics.record import StepRecord


def step(meter: Meter, number: int = 1, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {"tokens": 1000, "seconds": 0.5, "loss": 3.0, "lr": 1e-3, "grad_norm": 1.5}
    values |= {"peak_memory_gib": 4.0}
    return meter.record(number, **(values | fields))


def test_rates_by_hand() -> None:
    record = step(Meter(flops_per_token=6e9, num_devices=4, peak_tflops=10.0))
    assert record.tokens_per_s == 2000
    assert record.tflops_per_device == pytest.approx(2000 * 6e9 / 4 / 1e12)  # 3 TFLOP/s
    assert record.mfu == pytest.approx(0.3)
    assert (record.step, record.loss, record.lr, record.grad_norm) == (1, 3.0, 1e-3, 1.5)
    assert (record.step_time_s, record.peak_memory_gib, record.skipped, record.loss_scale) == (0.5, 4.0, 0, None)


def test_mfu_is_unknown_where_the_peak_is() -> None:
    record = step(Meter(flops_per_token=6e9, num_devices=4, peak_tflops=None))
    assert record.mfu is None
    assert record.tflops_per_device == pytest.approx(3)


def test_tokens_are_counted_on_from_a_resumed_run() -> None:
    meter = Meter(flops_per_token=1, num_devices=1, peak_tflops=None, tokens_seen=5000)
    assert step(meter).tokens == 6000
    assert step(meter, tokens=24).tokens == 6024


def test_validation_appears_only_where_there_was_one() -> None:
    meter = Meter(flops_per_token=1, num_devices=1, peak_tflops=None)
    assert step(meter).validation_loss is None
    assert step(meter).validation_perplexity is None
    record = step(meter, validation_loss=2.0, skipped=3, loss_scale=1024.0)
    assert record.validation_loss == 2.0
    assert record.validation_perplexity == pytest.approx(math.exp(2))
    assert (record.skipped, record.loss_scale) == (3, 1024.0)


def test_perplexity_of_a_diverged_model_is_infinite() -> None:
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_time_left_is_not_disturbed_by_a_slow_step() -> None:
    left = TimeLeft(total_steps=10)
    assert left.after(1, 60.0) == 9 * 60
    assert left.after(2, 1.0) == 8 * 30.5
    assert left.after(3, 1.0) == 7
    assert left.after(10, 1.0) == 0


def test_time_left_follows_a_lasting_change_of_speed() -> None:
    left = TimeLeft(total_steps=100, window=3)
    for number in range(1, 50):
        left.after(number, 1.0)
    left.after(50, 2.0)
    assert left.after(51, 2.0) == 98
