"""Fits the figures of a cluster to measured step times: few figures for all rows, drawn to what is known of the device.

Levenberg-Marquardt on the logarithms, so that a figure stays positive and its prior is a factor; large residuals count
linearly (Huber 1964), since tables hold mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pangu.config.cluster import ClusterConfig

FREEDOM: dict[str, float] = {
    "matmul.efficiency": 0.2,
    "matmul.attention": 0.4,
    "matmul.depth": 0.7,
    "matmul.waves": 0.7,
    "matmul.alignment": 0.7,
    "matmul.unaligned": 0.5,
    "memory.efficiency": 0.3,
    "inside.gb_s": 0.4,
    "between.gb_s": 0.4,
    "inside.latency_us": 1.0,
    "between.latency_us": 1.0,
    "launch_us": 0.7,
    "message_us": 2.0,
    "step_us": 1.0,
    "overlap": 0.05,
    "memory.context_gib": 1.0,
    "memory.workspace_gib": 1.5,
    "memory.communicator_gib": 0.5,
    "memory.fragmentation": 1.0,
}
"""What is fitted, and by about which factor (its logarithm) the truth may differ from the cluster's file."""
MEMORY = ("memory.context_gib", "memory.workspace_gib", "memory.communicator_gib", "memory.fragmentation")
"""Those of them that memory depends on."""
TIMES = tuple(name for name in FREEDOM if name not in MEMORY)
"""Those that times depend on."""
MOST = {"matmul.efficiency": 0.92, "memory.efficiency": 0.95, "matmul.attention": 0.9}
"""What no kernel reaches."""
NOISE = 0.03
"""Error of a measurement or of the model that is nobody's fault."""


def with_figures(cluster: ClusterConfig, figures: Mapping[str, float]) -> ClusterConfig:
    """The cluster with other figures, by dotted names."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        group, _, field = name.rpartition(".")
        groups.setdefault(group, {})[field] = value
    top: dict[str, Any] = {**groups.pop("", {})}
    nested: dict[str, Any] = {group: replace(getattr(cluster, group), **fields) for group, fields in groups.items()}
    return replace(cluster, **{**nested, **top})


def figures_of(cluster: ClusterConfig) -> dict[str, float]:
    """The figures that may be fitted."""
    fits = {}
    for name in FREEDOM:
        group, _, field = name.rpartition(".")
        fits[name] = float(getattr(getattr(cluster, group) if group else cluster, field))
    return fits


Factors = Mapping[str, float]
"""By dotted names of figures: fitted over the file's."""


def scaled(cluster: ClusterConfig, factors: Factors) -> ClusterConfig:
    """The cluster with its figures times `factors`, none above what can be."""
    start = figures_of(cluster)
    return with_figures(
        cluster, {name: min(start[name] * factor, MOST.get(name, math.inf)) for name, factor in factors.items()}
    )


def fit(
    errors: Callable[[Factors], Sequence[float]], names: Sequence[str] = TIMES, iterations: int = 40
) -> dict[str, float]:
    """The factors of a cluster's figures that make `errors`, the logarithms of predicted over measured times, small.

    Args:
        errors: of all rows with figures times the given factors.
        names: figures to fit, of `FREEDOM`.
        iterations: most steps.
    """
    width = np.array([FREEDOM[name] for name in names])

    def factors(x: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(x * width).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        rows = np.asarray(errors(factors(x))) / NOISE
        huber = np.sign(rows) * np.sqrt(np.where(abs(rows) < 2, rows**2, 4 * abs(rows) - 4))
        return np.concatenate([huber, x])

    x, damping = np.zeros(len(names)), 1.0
    now = residuals(x)
    for _ in range(iterations):
        jacobian = np.stack([(residuals(x + step) - now) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        gain = 0.0
        while damping < 1e6:
            curvature = jacobian.T @ jacobian + damping * np.eye(len(x))
            tried = np.clip(x - np.linalg.solve(curvature, jacobian.T @ now), -4, 4)
            then = residuals(tried)
            gain = float(now @ now - then @ then)
            if gain > 0:
                x, now, damping = tried, then, damping / 4
                break
            damping *= 4
        if gain < 1e-4 * float(now @ now):
            break
    return factors(x)
