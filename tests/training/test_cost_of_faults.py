"""The benchmark of what finding faults costs finds the costs of steps whose times are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.faults import EVERY, summary


def test_costs_are_found_in_steps_that_drift_and_vary() -> None:
    """Each step takes 2 % longer if it is switched on, and 0.7 s of each period are split between two steps."""
    place = np.arange(EVERY)
    steps = np.random.default_rng(1).normal(1.0, 0.01, (200, EVERY)) + np.linspace(0, 0.1, 200)[:, None]
    steps += 0.02 * (place % 4 >= 2) + 0.5 * (place == 15) + 0.2 * (place == 0)
    found = summary(steps)["percent"]
    # a step takes 1.05 s in the mean: 2 % of 1 s, and 0.7 s each 100 steps
    for name, cost in {"every_step": 2 / 1.05, "periodic": 0.7 / 1.05, "everything": 2.7 / 1.05}.items():
        median, lower, upper = found[name]
        assert lower < cost < upper
        assert upper - lower < 0.4
        assert median == pytest.approx((lower + upper) / 2, abs=0.1)
