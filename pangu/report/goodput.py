"""Expected goodput: the fraction of a run's time that trains, with failures, restarts and checkpoints.

Failures are a Poisson process. Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart
dumps", gives the expected time and the interval between checkpoints that minimizes it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pangu.config.cluster import FailureConfig


class ExpectedGoodput(NamedTuple):
    """Expected goodput of a run that saves at the best interval."""

    failures_per_day: float
    """Interruptions of the whole run."""
    interval_s: float
    """Seconds of training between two checkpoints."""
    goodput: float
    """Fraction of the time that trains: no restart, no checkpoint, no step that is repeated."""


def expected_goodput(devices: int, failures: FailureConfig, save_s: float) -> ExpectedGoodput:
    """Return the goodput of a run on `devices` devices, each checkpoint of which takes `save_s` seconds."""
    between_s = failures.device_hours / devices * 3600
    interval_s = best_interval(between_s, save_s)
    return ExpectedGoodput(86400 / between_s, interval_s, goodput(between_s, failures.restart_s, save_s, interval_s))


def best_interval(between_s: float, save_s: float) -> float:
    """Return the seconds of training between checkpoints that waste the least, with `between_s` between failures."""
    ratio = save_s / (2 * between_s)
    if ratio >= 1:
        return between_s
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(between_s: float, restart_s: float, save_s: float, interval_s: float) -> float:
    """Return the fraction of the time that trains, if training saves after each `interval_s` seconds of it."""
    exponent = (interval_s + save_s + restart_s) / between_s
    if exponent > 700:  # no interval ever ends
        return 0.0
    return interval_s / (between_s * (math.exp(exponent) - math.exp(restart_s / between_s)))
