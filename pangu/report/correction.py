"""Correction of a cluster's figures by a profiled run: the next forecast of the run is nearer to what it took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pangu.checkpoint.reading import read_yaml
from pangu.common.errors import UserError, reading
from pangu.common.files import read_json_object
from pangu.config.cluster import ClusterConfig, LinkConfig, cluster_in
from pangu.config.schema import RunConfig
from pangu.pipeline.layouts import choose_layout
from pangu.planning.cost import step_time
from pangu.planning.program import Plan, StepLedger, plan_of
from pangu.planning.search import space_of
from pangu.report.forecast import forecast_parts, measured_parts
from pangu.schedule.groups import groups_of

SENT = ("tensor", "expert", "pipeline", "data")
"""Rows of exposed communication."""
MOST = 4096.0
"""Largest factor by which a figure is corrected."""


class ProfiledRun(NamedTuple):
    """Ledger of a run's step, and the seconds that its profile measured by row of `ROWS`."""

    config: RunConfig
    ledger: StepLedger
    plan: Plan
    cluster: ClusterConfig
    """Cluster of the run, with the rates of its precision."""
    measured: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> ProfiledRun:
        """Return the run of a folder. Raises UserError if it cannot be read, or has no cluster or no profile."""
        values, summary = read_yaml(folder / "config.yaml"), read_json_object(folder / "summary.json")
        if not isinstance(values, dict) or values.get("cluster") is None or not summary.get("profile"):
            rule = "has no forecast and profile to compare; finish a run of 20 steps with cluster=NAME profile=true"
            raise UserError(f"{folder}: {rule}")
        wrong = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
        with reading(folder / "summary.json", *wrong, rule="is not the summary of a run"):
            chosen = choose_layout(values, int(summary["devices"]))
            median = (summary.get("forecast") or {}).get("measured_step_time_s")
            measured = measured_parts(summary["profile"]["ranks"], chosen.layout, median)
        if chosen.config.batch.stages:
            raise UserError(f"{folder}: batch.stages: a profile covers only the first; use a run without batch.stages")
        assert chosen.config.cluster is not None
        space = space_of(chosen.config, cluster_in(chosen.config.cluster), {})
        plan = plan_of(chosen.config, chosen.layout)
        return cls(chosen.config, space.program.describe(plan), plan, space.cluster, measured)

    def forecast(self, cluster: ClusterConfig) -> dict[str, float]:
        """Return the seconds of a step on a cluster by row of `ROWS`."""
        return forecast_parts(step_time(self.ledger, self.plan, cluster))

    def corrected(self) -> ClusterConfig:
        """Return the run's cluster with figures that make the forecast what the profile measured.

        One factor corrects all rates of computation, one the links that the layout uses, and `step_us` the update. The
        bubble has no figure of its own.
        """
        computing, sending = 1.0, 1.0
        groups = [group for group in groups_of(self.plan.layout, self.cluster.node).values() if group.size > 1]
        levels = {"inside" if group.size <= group.inside else "between" for group in groups}

        def with_rates(cluster: ClusterConfig, compute: float, links: float) -> ClusterConfig:
            changed = {}
            for level in levels:
                link = getattr(cluster, level)
                measured = tuple((*which, taken * links) for *which, taken in link.measured)
                changed[level] = LinkConfig(link.latency_us * links, link.gb_s / links, measured)
            return replace(_slower(cluster, compute), **changed, message_us=cluster.message_us * links)  # type: ignore[arg-type]

        def seconds(parts: Sequence[str], compute: float, links: float) -> float:
            forecast = self.forecast(with_rates(self.cluster, compute, links))
            return sum(forecast[part] for part in parts)

        for _ in range(3):  # how much communication is exposed depends on the computation that hides it
            computing = _factor(partial(seconds, ("compute",), links=sending), self.measured["compute"])
            sending = _factor(partial(seconds, SENT, computing), sum(self.measured[part] for part in SENT))
        rest = self.measured["update"] - seconds(("update",), computing, sending)
        step_us = max(0.0, self.cluster.step_us + 1e6 * rest)
        assert self.config.cluster is not None
        corrected = replace(with_rates(cluster_in(self.config.cluster), computing, sending), step_us=step_us)
        return cluster_in(asdict(corrected))

    def rows(self, cluster: ClusterConfig) -> list[tuple[str, float, float, float]]:
        """Return name, forecast, measured and corrected seconds of each row and of the sum; `cluster` is corrected."""
        before, after = map(self.forecast, (self.cluster, space_of(self.config, cluster, {}).cluster))
        sums = [{**times, "sum": sum(times.values())} for times in (before, self.measured, after)]
        return [(part, sums[0][part], sums[1][part], sums[2][part]) for part in sums[0]]


def _factor(seconds: Callable[[float], float], wanted: float) -> float:
    """Return the factor at which an increasing time is the one that is wanted; 1 if no factor changes it."""
    low, high = 1 / MOST, MOST
    if wanted <= 0 or seconds(low) == seconds(high):
        return 1.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return high


def _slower(cluster: ClusterConfig, factor: float) -> ClusterConfig:
    """Return a cluster that computes in `factor` times the time.

    A device has a printed peak, of which it reaches another part; a host's peak was measured.
    """
    matmul, memory = cluster.matmul, cluster.memory
    if cluster.queued:
        measured = tuple((*shape, share / factor) for *shape, share in matmul.measured)
        parts = {name: min(1.0, getattr(matmul, name) / factor) for name in ("efficiency", "attention")}
        matmul = replace(matmul, **parts, measured=measured)  # type: ignore[arg-type]
        memory = replace(memory, efficiency=min(1.0, memory.efficiency / factor))
    else:
        names = ("tflops", "tflops_fp32", "tflops_fp8")
        rates = {name: rate / factor for name in names if (rate := getattr(matmul, name)) is not None}
        matmul = replace(matmul, **rates)
        memory = replace(memory, gb_s=memory.gb_s / factor)
    times = {name: getattr(cluster, name) * factor for name in ("launch_us", "operator_us", "call_us")}
    rate = cluster.host_memory_gb_s / (1 if cluster.queued else factor)
    return replace(cluster, matmul=matmul, memory=memory, host_memory_gb_s=rate, **times)
