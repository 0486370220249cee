"""Predicts the rows of a table with fitted coefficients, and fits coefficients to rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from benchmarks.planner_accuracy.measurements import Row, Scope, grouped, kind_of
from benchmarks.planner_accuracy.published import RULES, Setup, data
from benchmarks.planner_accuracy.step import memory_gib, step_seconds
from pangu.config.cluster import ClusterConfig

TIMES, MEMORY, MOST = (data("figures")[name] for name in ("times", "memory", "most"))
"""Figures that times and memory depend on, with their priors, and the most that some can be (`figures.yaml`)."""
Factors = Mapping[str, float]
"""Fitted figures over those of the cluster's file, by dotted name."""


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
    times: Factors = field(default_factory=dict)
    """Factors of the cluster's figures that times depend on."""
    memory: Factors = field(default_factory=dict)
    """Factors of those that memory depends on."""
    shapes: Factors = field(default_factory=dict)
    """Layer's shape -> its time over that from the figures, where several rows tell of it."""
    stalls: Factors = field(default_factory=dict)
    """Nodes and what is sent -> seconds that it waits besides, where most runs on so many did."""


class Prediction(NamedTuple):
    """Predicted time and memory of a row."""

    row: Row
    seconds: float
    memory: float
    """GiB of the stage that needs most."""

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        return self.memory <= self.row.cluster.memory.gib


def scaled(cluster: ClusterConfig, factors: Factors) -> ClusterConfig:
    """Return the cluster with its figures times `factors`, none above what can be reached."""
    for name, factor in factors.items():
        group, _, field = name.rpartition(".")
        part: Any = getattr(cluster, group) if group else cluster
        part = replace(part, **{field: min(getattr(part, field) * factor, MOST.get(name, math.inf))})
        cluster = replace(cluster, **{group: part}) if group else part
    return cluster


def fit(errors: Callable[[Factors], Sequence[float]], freedom: Mapping[str, float]) -> dict[str, float]:
    """Return the factors of figures, `TIMES` or `MEMORY`, that make `errors` small, the logarithms of predicted over
    measured of all rows: least squares with priors on factors; large residuals count linearly (Huber 1964)."""
    width = np.array(list(freedom.values()))

    def factors(x: np.ndarray) -> dict[str, float]:
        return dict(zip(freedom, np.exp(x * width).tolist(), strict=True))

    def residuals(x: np.ndarray) -> np.ndarray:
        rows = np.asarray(errors(factors(x))) / RULES.noise
        huber = np.sign(rows) * np.sqrt(np.where(abs(rows) < 2, rows**2, 4 * abs(rows) - 4))
        return np.concatenate([huber, x])

    return factors(least_squares(residuals, np.zeros(len(width)), diff_step=1e-3, ftol=1e-4).x)


def shape_of(setup: Setup) -> str:
    """Return what the kernels of a layer depend on."""
    model, plan = setup.model, setup.plan
    sizes = model.hidden, model.heads, model.ffn_size, model.sequence // plan.context, plan.micro_size, plan.tensor
    return " ".join(map(str, (*sizes, plan.recompute)))


def waits_of(setup: Setup) -> tuple[str, float]:
    """Return what goes between nodes, and how often in a row: messages both ways (mean of the stages), or gradients."""
    plan = setup.plan
    if plan.pipeline == 1:
        return "reduce_scatter" if plan.zero else "all_reduce", 1.0
    return "send", plan.micro_batches * 2 * (plan.pipeline - 1) / plan.pipeline


def predict(row: Row, fitted: Fitted) -> Prediction:
    """Predict a row; of several setups that it may mean, the fastest that fits."""
    timed, filled = scaled(row.cluster, fitted.times), scaled(row.cluster, fitted.memory)
    options = []
    for setup in row.setups:
        seconds = step_seconds(setup, timed, fitted.shapes.get(shape_of(setup), 1.0) if fitted.shapes else 1.0)
        sent, times = waits_of(setup)
        seconds += times * fitted.stalls.get(f"{row.nodes} {sent}", 0.0)
        options.append(Prediction(row, seconds, memory_gib(setup, filled)))
    return min(options, key=lambda option: (not option.fits, option.seconds))


def log_errors(rows: Sequence[Row], fitted: Fitted, of: str = "seconds") -> list[float]:
    """Return the logarithms of predicted over measured `seconds` or `memory`."""
    return [math.log(getattr(predict(row, fitted), of) / getattr(row, of)) for row in rows]


def fit_rows(rows: Sequence[Row], scope: Scope = ("*", "", ""), program: str = "") -> Fitted:
    """Return the coefficients of a scope, fitted to at most `RULES.most_rows` of its rows."""
    everyone = [row for row in rows if row.seconds]
    timed, filled = _spread(everyone), _spread([row for row in rows if row.memory])
    # Networks between nodes are no property of the device, so those of a pool tell little of another source's.
    wider = RULES.wider if not program and len(timed) >= RULES.tells_enough else 1.0
    freedom = {name: wider * one / (1 + (program != "") * name.startswith("between.")) for name, one in TIMES.items()}
    figures: Factors = fit(lambda factors: log_errors(timed, Fitted(times=factors)), freedom) if timed else {}
    # A row that takes much longer than its like has another cause, and tells nothing of the figures.
    errors = log_errors(timed, Fitted(times=figures))
    is_large = len(timed) > RULES.models_at_most
    limit = RULES.farther * max(RULES.noise, median(map(abs, errors))) if is_large else RULES.unusual
    usual = [row for row, error in zip(timed, errors, strict=True) if abs(error) < limit]
    if 2 * len(usual) > len(timed) > len(usual):
        figures = fit(lambda factors: log_errors(usual, Fitted(times=factors)), freedom)
    memory = fit(lambda factors: log_errors(filled, Fitted(memory=factors), "memory"), MEMORY) if filled else {}
    fitted = Fitted(*scope, program, len(rows), figures, memory)
    fitted = replace(fitted, stalls=_stalls(everyone, fitted))
    return replace(fitted, shapes=_shapes(everyone, fitted))


def _spread(rows: list[Row]) -> list[Row]:
    """Return at most `RULES.most_rows` of the rows, evenly spread."""
    number = min(len(rows), RULES.most_rows)
    return [rows[place * len(rows) // number] for place in range(number)]


def _stalls(rows: Sequence[Row], fitted: Fitted) -> Factors:
    """Return what messages and gradients wait besides on so many nodes, where three of four runs did."""
    stalls = {}
    kinds = grouped((row for row in rows if row.nodes > 1), lambda row: f"{row.nodes} {waits_of(row.setups[0])[0]}")
    for kind, group in kinds.items():
        late = sorted(((one.seconds or 0) - predict(one, fitted).seconds) / waits_of(one.setups[0])[1] for one in group)
        if len(late) >= RULES.rows_in_pool and (least := late[len(late) // 4]) > RULES.least_stall:
            # the messages of a step wait alike; gradients go once, and half of the runs wait for them much longer
            stalls[kind] = median(late) if kind.endswith("send") else least
    return stalls


def _shapes(rows: Sequence[Row], fitted: Fitted) -> Factors:
    """Return the factors of the layers of each shape of two rows or more, as if one more row had no residual."""
    shapes = {}
    certain = (row for row in rows if len(row.setups) == 1)
    for shape, group in grouped(certain, lambda row: shape_of(row.setups[0])).items():
        errors = [error for error in log_errors(group, fitted) if abs(error) < RULES.unusual]
        if len(errors) > 1:
            shapes[shape] = math.exp(-median(errors) * len(errors) / (len(errors) + 1))
    return shapes


def cross_validated(rows: Sequence[Row]) -> list[Prediction]:
    """Predict the rows of a scope, each with coefficients that were fitted without it: without its model where there
    are few rows, otherwise without its fifth of the rows."""
    folds: list[object] = [row.model for row in rows]
    if len(rows) > RULES.models_at_most or len(set(folds)) == 1:
        folds = [place % RULES.folds for place in range(len(rows))]
    fits = {fold: fit_rows([row for row, one in zip(rows, folds, strict=True) if one != fold]) for fold in set(folds)}
    return [predict(row, fits[fold]) for row, fold in zip(rows, folds, strict=True)]


def pooled(scopes: Mapping[Scope, Sequence[Row]]) -> list[Fitted]:
    """Return the coefficients for sources that were never seen, of each family of devices, format and system, where
    sources of runs on many devices count alike, but those that differ by more than `RULES.disagreement` do not."""
    groups: dict[tuple[str, str, str], dict[Scope, list[Row]]] = defaultdict(dict)
    for scope, rows in scopes.items():
        timed = [row for row in rows if row.seconds and not row.out_of_memory]
        if timed and RULES.faulty not in scope[0] and max(row.cluster.devices for row in timed) >= RULES.many_devices:
            members = groups[*kind_of(scope), timed[0].setups[0].system.name]
            members[scope] = timed[:: max(1, len(timed) // RULES.rows_in_pool)][: RULES.rows_in_pool]
    pools = []
    for (family, format_, program), members in groups.items():
        while True:
            fitted = fit_rows([row for timed in members.values() for row in timed], ("*", family, format_), program)
            bias = {scope: abs(median(log_errors(timed, fitted))) for scope, timed in members.items()}
            worst = max(bias, key=bias.__getitem__)
            if len(members) < 3 or bias[worst] <= RULES.disagreement:
                break
            del members[worst]
        pools.append(fitted)
    return pools


def fitted_for(row: Row, fits: Sequence[Fitted]) -> Fitted:
    """Return what was fitted to a row's scope; else to its source on the same family of devices; else to its device and
    system, to its device and a system like it: times and memory each from the first that tells of them."""
    name = row.setups[0].system.name

    def distance(one: Fitted) -> int:
        scope = one.source, one.device, one.format
        is_unseen = scope == ("*", *kind_of(row.scope))
        is_source = one.source == row.source and kind_of(scope) == kind_of(row.scope)
        # Megatron's kernels are not those of others: what one lacks is no property of a device.
        is_like = is_unseen and one.program.startswith("megatron") == name.startswith("megatron")
        return (scope == row.scope, is_source, is_unseen and one.program == name, is_like, True).index(True)

    near = sorted((one for one in fits if distance(one) < 4), key=lambda one: (distance(one), -one.rows))
    times = next((one for one in near if one.times), Fitted())
    return replace(times, memory=next((one.memory for one in near if one.memory), {}))


def summarise(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors of rows, as fractions; None where no row says anything of it."""
    timed = [one for one in predictions if one.row.seconds and not one.row.out_of_memory]
    biases = [one.seconds / (one.row.seconds or math.nan) - 1 for one in timed]
    errors = [abs(bias) for bias in biases]
    memories = [abs(one.memory / one.row.memory - 1) for one in predictions if one.row.memory]
    failed = [one for one in predictions if one.row.out_of_memory]
    large = [group for group in grouped(timed, lambda one: one.row.sweep).values() if len(group) >= RULES.least_sweep]
    sweeps = [np.array([(one.seconds, one.row.seconds) for one in group], float).T for group in large]
    taus = [tau for sweep in sweeps if not math.isnan(tau := float(kendalltau(*sweep).statistic))]
    slowdowns = [float(measured[predicted.argmin()] / measured.min()) - 1 for predicted, measured in sweeps]
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
