"""Intervals of predicted step times, from the residuals of published measurements.

A plan uses the figures of a cluster file as they are, so these are residuals of the same figures. The table is written
by `python -m benchmarks.planner_accuracy --table FILE.csv --held-out --write pangu/report/intervals.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pangu.config.parallelism import peak_expert_load
from pangu.planning.program import Plan
from pangu.planning.search import Space

SHARE = 0.9
"""Probability that an interval contains a step of a source that was not measured."""


class Interval(NamedTuple):
    """Interval of measured over predicted step times of one kind of device, format and layout."""

    low: float
    """Lower end, as a factor of the predicted time."""
    high: float
    """Upper end, as a factor of the predicted time."""
    median: float
    """Median of the sources' medians, as a factor of the predicted time."""
    tie: float
    """Layouts of one model and batch whose predicted times differ by at most this factor are ties."""
    sources: int
    """Number of sources of the measurements, which count alike."""
    rows: int
    """Number of measurements."""


class Expectation(NamedTuple):
    """Interval of a layout's step time, and where it is from."""

    kind: str
    """Group of measurements that the layout belongs to."""
    group: str
    """Nearest group that enough sources measured: the interval is that group's."""
    interval: Interval
    assumed: str = ""
    """Assumptions: how tokens are routed to experts, and that nothing is compiled."""

    @property
    def words(self) -> str:
        """Sentence that says where the interval is from."""
        low, high, median, _, sources, rows = self.interval
        borrowed = "" if self.group == self.kind else f", borrowed: too few sources measured {self.kind}"
        return (
            f"{SHARE:.0%} of such steps take {low:.2f} to {high:.2f} times the predicted, "
            f"half of them more than {median:.2f}, by {rows:,} published steps "
            f"({self.group}, {sources} sources{borrowed}){self.assumed}"
        )


def expectation(space: Space, plan: Plan) -> Expectation:
    """Return the interval of a layout's step time."""
    precision = space.config.precision.compute if space.config.precision.matmul == "compute" else "fp8"
    kind, assumed = (space.cluster.name.split("_")[0].upper(), precision, plan.pipeline > 1), ""
    if plan.expert > 1 and not space.config.parallel.fixed_exchange:
        load = peak_expert_load(space.config.model, space.config.parallel.expert_imbalance, plan.expert)
        assumed = f"; the fullest device that shares experts gets {load:.3g} times the mean (parallel.expert_imbalance)"
    if space.config.compile:
        assumed += f"; compile = {str(space.config.compile).lower()} is not counted: times are without it"
    return Expectation(groups_of_kind(*kind)[0], *nearest(shipped(), *kind), assumed)


def groups_of_kind(device: str, precision: str, pipelined: bool) -> tuple[str, ...]:
    """Return the names of the groups of measurements that apply to a kind, nearest first."""
    layout = "with pipeline" if pipelined else "without pipeline"
    return f"{device} {precision} {layout}", f"{device} {precision}", device, precision, "all"


def nearest(table: Mapping[str, Interval], device: str, precision: str, pipelined: bool) -> tuple[str, Interval]:
    """Return the nearest group of a kind that is in the table, and its interval."""
    name = next(name for name in groups_of_kind(device, precision, pipelined) if name in table)
    return name, table[name]


@cache
def shipped() -> Mapping[str, Interval]:
    """Return the intervals of the shipped table, by group."""
    known: dict[str, Any] = json.loads(files(__package__).joinpath("intervals.json").read_text(encoding="utf-8"))
    return {name: Interval(**values) for name, values in known["intervals"].items()}
