"""Fits the figures of a cluster to measured step times: few figures for all rows, drawn to what is known of the device
by least squares of logarithms, so that a prior is a factor; large residuals count linearly (Huber 1964)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from pangu.config.cluster import ClusterConfig

TIMES = {
    "matmul.efficiency": 0.2, "matmul.attention": 0.4, "matmul.depth": 0.7, "matmul.waves": 0.7,
    "matmul.alignment": 0.7, "matmul.unaligned": 0.5, "memory.efficiency": 0.3, "inside.gb_s": 0.4,
    "inside.latency_us": 1.0, "between.gb_s": 0.4, "between.latency_us": 1.0, "launch_us": 0.7, "message_us": 2.0,
    "step_us": 1.0, "overlap": 0.05,
}  # fmt: skip
"""Figures that times depend on, with the logarithm of the factor by which a cluster's file may be wrong."""
MEMORY = {
    "memory.context_gib": 1.0, "memory.workspace_gib": 1.5, "memory.communicator_gib": 0.5, "memory.fragmentation": 1.0
}  # fmt: skip
"""Figures that memory depends on, likewise."""
MOST = {"matmul.efficiency": 0.92, "memory.efficiency": 0.95, "matmul.attention": 0.9}
"""Figures that no kernel exceeds."""
NOISE = 0.03
"""Relative error of a measurement or of the model."""
Factors = Mapping[str, float]
"""Fitted figures over those of the cluster's file, by dotted name."""


def scaled(cluster: ClusterConfig, factors: Factors) -> ClusterConfig:
    """Return the cluster with its figures times `factors`, none above what can be reached."""
    for name, factor in factors.items():
        group, _, field = name.rpartition(".")
        part: Any = getattr(cluster, group) if group else cluster
        part = replace(part, **{field: min(getattr(part, field) * factor, MOST.get(name, math.inf))})
        cluster = replace(cluster, **{group: part}) if group else part
    return cluster


def fit(errors: Callable[[Factors], Sequence[float]], freedom: Mapping[str, float]) -> dict[str, float]:
    """Return the factors of figures, `TIMES` or `MEMORY`, that make `errors` small: the logarithms of predicted over
    measured of all rows."""
    width = np.array(list(freedom.values()))

    def factors(x: np.ndarray) -> dict[str, float]:
        return dict(zip(freedom, np.exp(x * width).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        rows = np.asarray(errors(factors(x))) / NOISE
        huber = np.sign(rows) * np.sqrt(np.where(abs(rows) < 2, rows**2, 4 * abs(rows) - 4))
        return np.concatenate([huber, x])

    return factors(least_squares(residuals, np.zeros(len(width)), diff_step=1e-3, ftol=1e-4).x)
