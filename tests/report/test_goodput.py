"""The expected goodput of runs with failures, against a simulation and published runs."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.config.cluster import FailureConfig
from pangu.report.search_tables import best_interval, expected_goodput, goodput


def simulated(between_s: float, restart_s: float, save_s: float, interval_s: float, intervals: int) -> float:
    """Return the goodput of a run whose failures are drawn."""
    draw, elapsed = Random(0), 0.0
    failure = draw.expovariate(1 / between_s)
    for _ in range(intervals):
        end = elapsed + interval_s + save_s
        while failure < end:  # a failure in a restart begins another one
            elapsed, failure = failure + restart_s, failure + draw.expovariate(1 / between_s)
            while failure < elapsed:
                elapsed, failure = failure + restart_s, failure + draw.expovariate(1 / between_s)
            end = elapsed + interval_s + save_s
        elapsed = end
    return intervals * interval_s / elapsed


@pytest.mark.parametrize("devices", [2_048, 16_384])
@pytest.mark.parametrize("interval_s", [120.0, 1800.0])
def test_a_simulated_run_makes_as_much_progress(devices: int, interval_s: float) -> None:
    """To the error of the drawn failures: 1 % of the lost time with 40,000 failures."""
    between_s = FailureConfig().device_hours / devices * 3600
    intervals = math.ceil(40_000 * between_s / interval_s)
    expected = goodput(between_s, 600.0, 5.0, interval_s)
    assert simulated(between_s, 600.0, 5.0, interval_s, intervals) == pytest.approx(expected, abs=0.02 * (1 - expected))


def test_published_runs_are_within_what_they_report() -> None:
    """Llama 3 (2024): above 90 % on 16,384 GPUs; MegaScale (2024): above 90 % on 12,288."""
    for devices in (12_288, 16_384):
        assert 0.9 < expected_goodput(devices, FailureConfig(), 2.0).goodput < 0.95


@given(st.floats(600.0, 1e7), st.floats(0.0, 3600.0), st.floats(0.1, 100.0))
def test_no_other_interval_is_better(between_s: float, restart_s: float, save_s: float) -> None:
    """To 0.1 %: the interval is a series in the ratio of saving to failing."""
    best = best_interval(between_s, save_s)
    most = goodput(between_s, restart_s, save_s, best)
    for factor in (0.2, 0.5, 0.8, 1.2, 2.0, 5.0):
        assert goodput(between_s, restart_s, save_s, factor * best) <= most * 1.001


def test_a_run_that_fails_before_each_checkpoint_never_ends() -> None:
    assert goodput(1.0, 600.0, 5.0, 600.0) == 0.0
    assert best_interval(1.0, 5.0) == 1.0
