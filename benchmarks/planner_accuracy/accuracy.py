"""How far predictions are from published measurements, by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.planner_accuracy.fit import MEMORY, Factors, fit, scaled
from benchmarks.planner_accuracy.measurements import ALIKE, Row, family_of, word_of
from benchmarks.planner_accuracy.published import describe
from pangu.config.cluster import ClusterConfig
from pangu.planning.cost import StepTime, step_time
from pangu.planning.layout_work import Plan
from pangu.planning.memory import memory_of_stages

MOST_ROWS = 150
"""Of a scope that are fitted to."""
MOST_OF_SHAPE = 0.5
"""Logarithm of the largest factor of a layer's shape."""
LEAST_OF_SHAPE = 2
"""Rows of a layer's shape from which on it has an efficiency of its own."""
FOLDS = 5
MODELS_AT_MOST = 40
"""Rows up to which one model after the other is left out, rather than a fifth of the rows."""
FORMAT_RATES = {"bf16": 1.0, "fp8": 2.0, "fp4": 4.0}
"""Peak of a format over that of the 16-bit ones: NVIDIA's data sheets."""
FAULTY = ("BigScience",)
"""Sources that do not speak for others: on that cluster PCIe and NUMA settings were wrong for half of the runs."""
LEAST_ROWS = 4
"""Of a scope that has coefficients of its own; one with fewer is predicted as one that was never seen."""
MANY_DEVICES = 64
"""Of a source that speaks for others."""
ROWS_IN_POOL = 12
"""Of each source."""
DISAGREEMENT = 0.1
"""Logarithm of a source's median time over those of all others."""
UNUSUAL = math.log(2)
"""Logarithm of how far a row may be from its like without being left out of a fit."""
LEAST_STALL = 0.1
"""Seconds of a message that are no latency of a network."""
LEAST_SWEEP = 3
"""Rows of a sweep that say something of an order."""


class Scope(NamedTuple):
    """Rows that have one set of coefficients: a source's measurements on one kind of device."""

    source: str
    device: str
    format: str

    @classmethod
    def of(cls, row: Row) -> Scope:
        """Of a row."""
        return cls(row.source, row.device, row.format)


@dataclass(frozen=True)
class Fitted:
    """What was fitted to some rows."""

    times: Factors = field(default_factory=dict)
    """Of figures of the cluster that times depend on."""
    memory: Factors = field(default_factory=dict)
    """Of those that memory depends on."""
    shapes: Factors = field(default_factory=dict)
    """Layer's shape -> its time over that from the figures, where several rows tell of it."""
    stalls: Factors = field(default_factory=dict)
    """Nodes -> seconds that a message between stages waits besides, where most runs on so many did."""


class Coefficients(NamedTuple):
    """Fitted factors, and of what."""

    scope: Scope
    """With the source `*`: for sources that were never seen."""
    program: str
    """For a source `*`: the program it is of; otherwise empty."""
    fitted: Fitted
    rows: int


@dataclass(frozen=True)
class Prediction:
    """A row, and what the model says of it."""

    row: Row
    time: StepTime
    memory: float
    """GiB of the fullest stage."""
    fits: bool

    @property
    def error(self) -> float:
        """Of the time: predicted over measured, less 1."""
        assert self.row.seconds is not None
        return self.time.total / self.row.seconds - 1


def cluster_of(row: Row, clusters: Mapping[str, ClusterConfig]) -> ClusterConfig | None:
    """What is known of a row's cluster: its device's file, the format of its products and the network it tells of."""
    cluster = clusters.get(row.family.lower())
    if cluster is None:
        return None
    rate = FORMAT_RATES[row.format]
    if row.format != "bf16":
        # less of a higher peak is reached
        matmul = replace(
            cluster.matmul, tflops=cluster.matmul.tflops * rate, efficiency=cluster.matmul.efficiency * 0.9
        )
        cluster = replace(cluster, matmul=matmul)
    if (alike := ALIKE.get(word_of(row.device))) is not None:
        matmul = replace(cluster.matmul, tflops=cluster.matmul.tflops * alike.products)
        inside = replace(cluster.inside, gb_s=cluster.inside.gb_s * alike.links)
        cluster = replace(cluster, matmul=matmul, inside=inside)
    if row.network is not None:
        each = cluster.between.gb_s * row.network / (_NOMINAL.get(cluster.name, cluster.between.gb_s) * cluster.nics)
        cluster = replace(cluster, between=replace(cluster.between, gb_s=each))
    if "40G" in row.device:
        # NVIDIA's data sheet of the A100 of 40 GB
        cluster = replace(cluster, memory=replace(cluster.memory, gib=39.4, gb_s=1555.0))
    return replace(cluster, node=row.node, devices=row.devices)


_NOMINAL = {"a100": 25.0, "h100": 50.0, "h200": 50.0, "v100": 12.5}
"""GB/s that an interface of a file is sold as, of which `between.gb_s` is what is reached."""


def shape_of(row: Row, plan: Plan) -> str:
    """What the kernels of a layer see."""
    shape = row.shape
    numbers = (shape.hidden, shape.heads, shape.ffn, shape.sequence // plan.context, plan.micro_size, plan.tensor)
    return " ".join(map(str, (*numbers, plan.recompute)))


def predict_time(row: Row, plan: Plan, cluster: ClusterConfig, fitted: Fitted) -> StepTime:
    """The time of a row with one of its layouts."""
    workload = describe(row.shape, row.system, plan)
    known = scaled(cluster, fitted.times)
    time = step_time(workload, plan.steps, plan.layout, known, row.system.hidden_messages)
    factor = fitted.shapes.get(shape_of(row, plan)) if fitted.shapes else None
    time = time if factor is None else time.slowed(factor)
    return replace(time, pipeline=time.pipeline + messages_of(plan) * fitted.stalls.get(nodes_of(row), 0.0))


def nodes_of(row: Row) -> str:
    """How many nodes a row's run was on."""
    return str(row.devices // row.node)


def messages_of(plan: Plan) -> float:
    """Messages between stages that follow each other in a step: to and fro, mean over the stages."""
    return plan.micro_batches * 2 * (plan.pipeline - 1) / plan.pipeline


def predict_memory(row: Row, plan: Plan, cluster: ClusterConfig, fitted: Fitted) -> float:
    """GiB of the fullest stage."""
    known = scaled(cluster, fitted.memory)
    stages = memory_of_stages(describe(row.shape, row.system, plan), plan.steps, known)
    return max(stage.total for stage in stages)


def predict(row: Row, cluster: ClusterConfig, fitted: Fitted) -> Prediction:
    """What the model says of a row; of several layouts that it may mean, of the fastest that fits."""
    options = []
    for plan in row.plans:
        memory = predict_memory(row, plan, cluster, fitted)
        time = predict_time(row, plan, cluster, fitted)
        options.append(Prediction(row, time, memory, memory <= cluster.memory.gib))
    return min(options, key=lambda option: (not option.fits, option.time.total))


def _seconds(row: Row, cluster: ClusterConfig, fitted: Fitted) -> float:
    """Of a row, as `predict` says."""
    if len(row.plans) == 1:
        return predict_time(row, row.plans[0], cluster, fitted).total
    return predict(row, cluster, fitted).time.total


def time_errors(pairs: Sequence[tuple[Row, ClusterConfig]], fitted: Fitted) -> list[float]:
    """Logarithms of predicted over measured times."""
    return [
        math.log(min(predict_time(row, plan, cluster, fitted).total for plan in row.plans) / (row.seconds or 1))
        for row, cluster in pairs
    ]


def fit_rows(rows: Sequence[Row], clusters: Mapping[str, ClusterConfig]) -> Fitted:
    """Coefficients fitted to at most `MOST_ROWS` of the rows."""
    known = [(row, cluster) for row in rows if (cluster := cluster_of(row, clusters)) is not None]
    timed = _spread([pair for pair in known if pair[0].seconds])
    filled = _spread([pair for pair in known if pair[0].memory])

    def times(factors: Factors) -> list[float]:
        return [math.log(_seconds(row, cluster, Fitted(factors)) / (row.seconds or 1)) for row, cluster in timed]

    def memories(factors: Factors) -> list[float]:
        return [
            math.log(predict(row, cluster, Fitted(memory=factors)).memory / (row.memory or 1))
            for row, cluster in filled
        ]

    figures: Factors = fit(times) if timed else {}
    # what takes twice as long as its like has another cause; it tells nothing of the figures
    usual = [
        pair for pair, error in zip(timed, time_errors(timed, Fitted(figures)), strict=True) if abs(error) < UNUSUAL
    ]
    if 2 * len(usual) > len(timed) > len(usual):
        timed = usual
        figures = fit(times)
    memory: Factors = fit(memories, MEMORY) if filled else {}
    everyone = [pair for pair in known if pair[0].seconds]
    fitted = Fitted(figures, memory)
    fitted = replace(fitted, stalls=_stalls(everyone, fitted))
    return replace(fitted, shapes=_shapes(everyone, fitted))


def _stalls(pairs: Sequence[tuple[Row, ClusterConfig]], fitted: Fitted) -> Factors:
    """What messages wait for besides on so many nodes, where three of four runs did."""
    waits: dict[str, list[float]] = defaultdict(list)
    for row, cluster in pairs:
        plan = row.plans[0]
        if plan.pipeline > 1 and row.devices > row.node:
            seconds = predict_time(row, plan, cluster, fitted).total
            waits[nodes_of(row)].append(((row.seconds or 0.0) - seconds) / messages_of(plan))
    return {
        nodes: median(seconds)
        for nodes, seconds in waits.items()
        if len(seconds) >= ROWS_IN_POOL and sorted(seconds)[len(seconds) // 4] > LEAST_STALL
    }


def _shapes(pairs: Sequence[tuple[Row, ClusterConfig]], fitted: Fitted) -> Factors:
    """How much longer than by the figures the layers of each shape take, as if one more row had no residual."""
    residuals: dict[str, list[float]] = defaultdict(list)
    for (row, _), error in zip(pairs, time_errors(pairs, fitted), strict=True):
        if len(row.plans) == 1 and abs(error) < UNUSUAL:
            residuals[shape_of(row, row.plans[0])].append(-error)
    return {
        shape: math.exp(max(-MOST_OF_SHAPE, min(MOST_OF_SHAPE, median(errors) * len(errors) / (len(errors) + 1))))
        for shape, errors in residuals.items()
        if len(errors) >= LEAST_OF_SHAPE
    }


def _spread(pairs: list[Any]) -> list[Any]:
    """`MOST_ROWS` of the pairs, from all over."""
    return [pairs[number * len(pairs) // MOST_ROWS] for number in range(MOST_ROWS)] if len(pairs) > MOST_ROWS else pairs


def folds_of(rows: Sequence[Row]) -> list[set[int]]:
    """Places of the rows that are left out together: those of a model, or a fifth of them."""
    models = sorted({row.model for row in rows})
    if len(rows) <= MODELS_AT_MOST and len(models) > 1:
        return [{place for place, row in enumerate(rows) if row.model == model} for model in models]
    return [set(range(first, len(rows), FOLDS)) for first in range(min(FOLDS, len(rows)))]


def cross_validated(rows: Sequence[Row], clusters: Mapping[str, ClusterConfig]) -> list[Prediction]:
    """Predictions of the rows of a scope, each with coefficients that were fitted without it."""
    predictions: dict[int, Prediction] = {}
    for fold in folds_of(rows):
        rest = [row for place, row in enumerate(rows) if place not in fold]
        fitted = fit_rows(rest, clusters)
        for place in fold:
            cluster = cluster_of(rows[place], clusters)
            if cluster is not None:
                predictions[place] = predict(rows[place], cluster, fitted)
    return [predictions[place] for place in sorted(predictions)]


def pooled(scopes: Mapping[Scope, Sequence[Row]], clusters: Mapping[str, ClusterConfig]) -> list[Coefficients]:
    """Coefficients for sources that were never seen, of each family of devices, format and program.

    Sources of runs on many devices count alike. Those that differ from the others by more than `DISAGREEMENT` are left
    out, the worst first: something of their hardware or program is not told.
    """
    groups: dict[tuple[str, str, str], dict[Scope, list[Row]]] = defaultdict(dict)
    for scope, rows in scopes.items():
        timed = [row for row in rows if row.seconds and not row.out_of_memory]
        if not timed or any(word in scope.source for word in FAULTY):
            continue
        row = timed[0]
        if max(row.devices for row in timed) >= MANY_DEVICES and cluster_of(row, clusters):
            step = max(1, len(timed) // ROWS_IN_POOL)
            groups[row.family, row.format, row.system.name][scope] = timed[::step][:ROWS_IN_POOL]
    layouts = []
    for (family, format_, program), members in groups.items():
        while True:
            rows = [row for timed in members.values() for row in timed]
            fitted = fit_rows(rows, clusters)
            bias = {scope: median(_residuals(timed, clusters, fitted)) for scope, timed in members.items()}
            worst = max(bias, key=lambda scope: abs(bias[scope]))
            if len(members) < 3 or abs(bias[worst]) <= DISAGREEMENT:
                break
            del members[worst]
        layouts.append(Coefficients(Scope("*", family, format_), program, fitted, len(rows)))
    return layouts


def _residuals(rows: Sequence[Row], clusters: Mapping[str, ClusterConfig], fitted: Fitted) -> list[float]:
    known = [(row, cluster) for row in rows if (cluster := cluster_of(row, clusters)) is not None]
    return time_errors(known, fitted)


def fitted_for(row: Row, fits: Sequence[Coefficients]) -> Fitted:
    """What was fitted to a row's scope; else to its source on the same family of devices; else to its device and
    program, to its device: times and memory each from the first that tells of them."""
    likeness = [
        (
            one.scope == Scope.of(row),
            one.scope.source == row.source and _kind(one.scope) == (row.family, row.format),
            one.scope == Scope("*", row.family, row.format) and one.program == row.system.name,
            one.scope == Scope("*", row.family, row.format),
        )
        for one in fits
    ]
    alike = [(like.index(True), -one.rows, one.fitted) for like, one in zip(likeness, fits, strict=True) if any(like)]
    alike.sort(key=lambda entry: entry[:2])
    times = next((fitted for *_, fitted in alike if fitted.times), Fitted())
    memory = next((fitted.memory for *_, fitted in alike if fitted.memory), {})
    return replace(times, memory=memory)


def _kind(scope: Scope) -> tuple[str, str]:
    """Family of a scope's devices, and its format."""
    return family_of(scope.device), scope.format


def predict_rows(
    rows: Sequence[Row], clusters: Mapping[str, ClusterConfig], fits: Sequence[Coefficients]
) -> list[Prediction]:
    """Predictions of the rows whose devices are known."""
    predictions = []
    for row in rows:
        cluster = cluster_of(row, clusters)
        if cluster is not None:
            predictions.append(predict(row, cluster, fitted_for(row, fits)))
    return predictions


def summarise(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Errors of a source's rows, as fractions; None where no row says anything of it."""
    timed = [one for one in predictions if one.row.seconds and not one.row.out_of_memory]
    errors = [abs(one.error) for one in timed]
    memories = [abs(one.memory / one.row.memory - 1) for one in predictions if one.row.memory]
    failed = [one for one in predictions if one.row.out_of_memory]
    taus, slowdowns = [], []
    for sweep in sweeps_of(timed):
        tau = kendall_tau([one.time.total for one in sweep], [one.row.seconds or 0.0 for one in sweep])
        if tau is not None:
            taus.append(tau)
        picked = min(sweep, key=lambda one: one.time.total).row.seconds or 0.0
        slowdowns.append(picked / min(one.row.seconds or math.inf for one in sweep) - 1)
    return {
        "rows": len(timed),
        "time_mean_error": fmean(errors) if errors else None,
        "time_median_error": median(errors) if errors else None,
        "time_worst_error": max(errors) if errors else None,
        "time_bias": fmean(one.error for one in timed) if timed else None,
        "memory_rows": len(memories),
        "memory_mean_error": fmean(memories) if memories else None,
        "sweeps": len(slowdowns),
        "tau": fmean(taus) if taus else None,
        "pick_slowdown": fmean(slowdowns) if slowdowns else None,
        "pick_worst_slowdown": max(slowdowns) if slowdowns else None,
        "out_of_memory_rows": len(failed),
        "out_of_memory_told": sum(not one.fits for one in failed),
        "out_of_memory_false": sum(not one.fits for one in timed),
    }


def sweeps_of(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Measurements that differ in the layout only, `LEAST_SWEEP` or more."""
    groups: dict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.row.sweep].append(one)
    return [group for group in groups.values() if len(group) >= LEAST_SWEEP]


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's rank correlation (tau-b); None if all of a kind are equal."""
    concordant = ties_a = ties_b = pairs = 0
    for i in range(len(predicted)):
        for j in range(i):
            a, b = predicted[i] - predicted[j], measured[i] - measured[j]
            pairs += 1
            ties_a += a == 0
            ties_b += b == 0
            concordant += (a * b > 0) - (a * b < 0)
    scale = math.sqrt((pairs - ties_a) * (pairs - ties_b))
    return concordant / scale if scale else None
