"""Predicts the rows of a table with fitted coefficients, and fits coefficients to rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.planner_accuracy.fit import MEMORY, TIMES, Factors, fit, scaled
from benchmarks.planner_accuracy.measurements import Row, Scope, grouped, kind_of
from benchmarks.planner_accuracy.published import Setup
from benchmarks.planner_accuracy.step import memory_gib, step_seconds

MOST_ROWS = 150
"""Rows of a scope that are fitted to."""
MOST_OF_SHAPE = 0.5
"""Logarithm of the largest factor of a layer's shape."""
LEAST_OF_SHAPE = 2
"""Rows of a layer's shape from which on it has an efficiency of its own."""
FOLDS = 5
"""Folds of a cross-validation that does not leave out models."""
MODELS_AT_MOST = 40
"""Rows up to which one model after the other is left out, rather than a fifth of the rows."""
FAULTY = "BigScience"
"""Source that does not speak for others: on its cluster PCIe and NUMA settings were wrong for half of the runs."""
LEAST_ROWS = 4
"""Rows of a scope that has coefficients of its own; one with fewer is predicted like one that was never seen."""
MANY_DEVICES = 64
"""Devices of a source that speaks for others."""
ROWS_IN_POOL = 12
"""Rows of each source in a pool."""
DISAGREEMENT = 0.1
"""Logarithm of a source's median time over those of all others."""
UNUSUAL = math.log(2)
"""Logarithm of how far a row may be off without being left out of a fit."""
LEAST_STALL = 0.1
"""Seconds of a message that are no latency of a network."""
LEAST_SWEEP = 3
"""Rows of a sweep that say something of an order."""


@dataclass(frozen=True)
class Fitted:
    """Coefficients that were fitted to some rows."""

    source: str = "*"
    """Source of the rows; `*`: coefficients for sources that were never seen."""
    device: str = ""
    format: str = ""
    program: str = ""
    """Name of the system, where the source is `*`."""
    rows: int = 0
    """How many rows there were."""
    times: Factors = field(default_factory=dict)
    """Factors of the cluster's figures that times depend on."""
    memory: Factors = field(default_factory=dict)
    """Factors of those that memory depends on."""
    shapes: Factors = field(default_factory=dict)
    """Layer's shape -> its time over that from the figures, where several rows tell of it."""
    stalls: Factors = field(default_factory=dict)
    """Nodes -> seconds that a message between stages waits besides, where most runs on so many did."""

    @property
    def scope(self) -> Scope:
        """Scope of the rows."""
        return self.source, self.device, self.format


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a row."""

    row: Row
    seconds: float
    memory: float
    """GiB of the stage that needs most."""

    @property
    def error(self) -> float:
        """Logarithm of the measured over the predicted time."""
        return math.log((self.row.seconds or math.nan) / self.seconds)

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        return self.memory <= self.row.cluster.memory.gib


def shape_of(setup: Setup) -> str:
    """Return what the kernels of a layer depend on."""
    shape, layout = setup.shape, setup.layout
    length = shape.sequence // layout.context
    numbers = (shape.hidden, shape.heads, shape.ffn, length, setup.micro_size, layout.tensor)
    return " ".join(map(str, (*numbers, setup.recompute)))


def messages_of(setup: Setup) -> float:
    """Return the messages between stages that follow each other in a step: both ways, mean over the stages."""
    return setup.micro_batches * 2 * (setup.layout.pipeline - 1) / setup.layout.pipeline


def predict(row: Row, fitted: Fitted) -> Prediction:
    """Predict a row; of several setups that it may mean, the fastest that fits."""
    timed, filled = scaled(row.cluster, fitted.times), scaled(row.cluster, fitted.memory)
    options = []
    for setup in row.setups:
        slowdown = fitted.shapes.get(shape_of(setup), 1.0) if fitted.shapes else 1.0
        stalled = messages_of(setup) * fitted.stalls.get(str(row.nodes), 0.0)
        seconds = step_seconds(setup, timed, slowdown) + stalled
        options.append(Prediction(row, seconds, memory_gib(setup, filled)))
    return min(options, key=lambda option: (not option.fits, option.seconds))


def log_errors(rows: Sequence[Row], fitted: Fitted, of: str = "seconds") -> list[float]:
    """Return the logarithms of predicted over measured `seconds` or `memory`."""
    return [math.log(getattr(predict(row, fitted), of) / getattr(row, of)) for row in rows]


def fit_rows(rows: Sequence[Row], scope: Scope = ("*", "", ""), program: str = "") -> Fitted:
    """Return the coefficients of a scope, fitted to at most `MOST_ROWS` of its rows."""
    everyone = [row for row in rows if row.seconds]
    timed, filled = _spread(everyone), _spread([row for row in rows if row.memory])
    figures: Factors = fit(lambda factors: log_errors(timed, Fitted(times=factors)), TIMES) if timed else {}
    # A row that takes twice as long as its like has another cause, and tells nothing of the figures.
    errors = log_errors(timed, Fitted(times=figures))
    usual = [row for row, error in zip(timed, errors, strict=True) if abs(error) < UNUSUAL]
    if 2 * len(usual) > len(timed) > len(usual):
        figures = fit(lambda factors: log_errors(usual, Fitted(times=factors)), TIMES)
    memory = fit(lambda factors: log_errors(filled, Fitted(memory=factors), "memory"), MEMORY) if filled else {}
    fitted = Fitted(*scope, program, len(rows), figures, memory)
    fitted = replace(fitted, stalls=_stalls(everyone, fitted))
    return replace(fitted, shapes=_shapes(everyone, fitted))


def _spread(rows: list[Row]) -> list[Row]:
    """Return at most `MOST_ROWS` of the rows, evenly spread."""
    count = min(MOST_ROWS, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def _stalls(rows: Sequence[Row], fitted: Fitted) -> Factors:
    """Return what messages wait besides on so many nodes, where three of four runs did."""
    waits: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.setups[0].layout.pipeline > 1 and row.nodes > 1:
            wait = (row.seconds or math.nan) - predict(row, fitted).seconds
            waits[str(row.nodes)].append(wait / messages_of(row.setups[0]))
    return {
        nodes: median(seconds)
        for nodes, seconds in waits.items()
        if len(seconds) >= ROWS_IN_POOL and sorted(seconds)[len(seconds) // 4] > LEAST_STALL
    }


def _shapes(rows: Sequence[Row], fitted: Fitted) -> Factors:
    """Return the factors of the layers of each shape, as if one more row had no residual."""
    residuals: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, log_errors(rows, fitted), strict=True):
        if len(row.setups) == 1 and abs(error) < UNUSUAL:
            residuals[shape_of(row.setups[0])].append(-error)
    return {
        shape: math.exp(max(-MOST_OF_SHAPE, min(MOST_OF_SHAPE, median(errors) * len(errors) / (len(errors) + 1))))
        for shape, errors in residuals.items()
        if len(errors) >= LEAST_OF_SHAPE
    }


def cross_validated(rows: Sequence[Row]) -> list[Prediction]:
    """Predict the rows of a scope, each with coefficients that were fitted without it: without its model where there
    are few rows, otherwise without its fifth of the rows."""
    models = sorted({row.model for row in rows})
    folds = [set(range(first, len(rows), FOLDS)) for first in range(min(FOLDS, len(rows)))]
    if len(rows) <= MODELS_AT_MOST and len(models) > 1:
        folds = [{place for place, row in enumerate(rows) if row.model == model} for model in models]
    predictions: dict[int, Prediction] = {}
    for fold in folds:
        fitted = fit_rows([row for place, row in enumerate(rows) if place not in fold])
        predictions |= {place: predict(rows[place], fitted) for place in fold}
    return [predictions[place] for place in sorted(predictions)]


def pooled(scopes: Mapping[Scope, Sequence[Row]]) -> list[Fitted]:
    """Return the coefficients for sources that were never seen, of each family of devices, format and system.

    Sources of runs on many devices count alike. Those that differ from the others by more than `DISAGREEMENT` are left
    out, the worst first: something of their hardware or system is not told.
    """
    groups: dict[tuple[str, str, str], dict[Scope, list[Row]]] = defaultdict(dict)
    for scope, rows in scopes.items():
        timed = [row for row in rows if row.seconds and not row.out_of_memory]
        if timed and FAULTY not in scope[0] and max(row.cluster.devices for row in timed) >= MANY_DEVICES:
            chosen = timed[:: max(1, len(timed) // ROWS_IN_POOL)][:ROWS_IN_POOL]
            groups[*kind_of(scope), timed[0].setups[0].system.name][scope] = chosen
    pools = []
    for (family, format_, program), members in groups.items():
        while True:
            rows = [row for timed in members.values() for row in timed]
            fitted = fit_rows(rows, ("*", family, format_), program)
            bias = {scope: abs(median(log_errors(timed, fitted))) for scope, timed in members.items()}
            worst = max(bias, key=bias.__getitem__)
            if len(members) < 3 or bias[worst] <= DISAGREEMENT:
                break
            del members[worst]
        pools.append(fitted)
    return pools


def fitted_for(row: Row, fits: Sequence[Fitted]) -> Fitted:
    """Return what was fitted to a row's scope; else to its source on the same family of devices; else to its device and
    system, to its device and a system like it: times and memory each from the first that tells of them."""
    name = row.setups[0].system.name

    def distance(one: Fitted) -> int:
        is_unseen = one.scope == ("*", *kind_of(row.scope))
        is_source = one.source == row.source and kind_of(one.scope) == kind_of(row.scope)
        # Megatron's kernels are not those of others: what one lacks is no property of a device.
        is_like = is_unseen and one.program.startswith("megatron") == name.startswith("megatron")
        return (one.scope == row.scope, is_source, is_unseen and one.program == name, is_like, True).index(True)

    near = sorted((one for one in fits if distance(one) < 4), key=lambda one: (distance(one), -one.rows))
    times = next((one for one in near if one.times), Fitted())
    return replace(times, memory=next((one.memory for one in near if one.memory), {}))


def predict_rows(rows: Sequence[Row], fits: Sequence[Fitted]) -> list[Prediction]:
    """Predict rows, each by the fit that is nearest to it."""
    return [predict(row, fitted_for(row, fits)) for row in rows]


def summarise(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors of rows, as fractions; None where no row says anything of it."""
    timed = [one for one in predictions if one.row.seconds and not one.row.out_of_memory]
    biases = [one.seconds / (one.row.seconds or math.nan) - 1 for one in timed]
    errors = [abs(bias) for bias in biases]
    memories = [abs(one.memory / one.row.memory - 1) for one in predictions if one.row.memory]
    failed = [one for one in predictions if one.row.out_of_memory]
    groups = grouped(timed, lambda one: one.row.sweep).values()
    sweeps = [
        [(one.seconds, one.row.seconds or math.nan) for one in group] for group in groups if len(group) >= LEAST_SWEEP
    ]
    taus = [tau for sweep in sweeps if (tau := kendall_tau(sweep)) is not None]
    slowdowns = [
        min(sweep, key=lambda pair: pair[0])[1] / min(measured for _, measured in sweep) - 1 for sweep in sweeps
    ]
    return {
        "rows": len(timed),
        "time_mean_error": fmean(errors) if errors else None,
        "time_median_error": median(errors) if errors else None,
        "time_worst_error": max(errors, default=None),
        "time_bias": fmean(biases) if biases else None,
        "memory_rows": len(memories),
        "memory_mean_error": fmean(memories) if memories else None,
        "sweeps": len(slowdowns),
        "tau": fmean(taus) if taus else None,
        "pick_slowdown": fmean(slowdowns) if slowdowns else None,
        "pick_worst_slowdown": max(slowdowns, default=None),
        "out_of_memory_rows": len(failed),
        "out_of_memory_told": sum(not one.fits for one in failed),
        "out_of_memory_false": sum(not one.fits for one in timed),
    }


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's rank correlation (tau-b) of predicted and measured; None if all of a kind are equal."""
    predicted, measured = (np.sign(np.subtract.outer(of_kind, of_kind)) for of_kind in np.array(pairs).T)
    counted = math.sqrt((predicted**2).sum() * (measured**2).sum())
    return float((predicted * measured).sum() / counted) if counted else None
