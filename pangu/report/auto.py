"""Layout choice for `parallel=auto`: the planner picks the fastest layout for the devices of a run, and says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from pangu.common.errors import ConfigError, UserError
from pangu.config.checks import find_problems
from pangu.config.cluster import ClusterConfig, cluster_in
from pangu.config.schema import RunConfig
from pangu.dryrun.roles import kept_workers
from pangu.metrics.text import quantity
from pangu.planning.find import find_layouts, overrides_of
from pangu.planning.program import Plan, grouped
from pangu.report.clusters import cluster_names
from pangu.report.search_tables import ties
from pangu.topology.launch import Launch

CHOSEN_GROUPS = ("parallel", "batch", "memory")
"""Configuration groups that a layout sets."""
CHOICES = 3
"""Number of fastest layouts that the log names."""


def choose_automatically(
    values: Mapping[str, Any],
    given: Set[str],
    devices: int,
    node: int,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with the layout predicted to be the fastest, and log lines that explain the choice.

    Args:
        values: the composed configuration, with `parallel.auto`.
        given: keys set on the command line, whose values are kept.
        devices: number of devices in the run.
        node: number of devices per node.
        on_progress: called after each dry run.
    """
    cluster = {**values["cluster"], "devices": devices, "node": min(node, devices)}
    with kept_workers(on_progress):
        outcome = find_layouts({**values, "cluster": cluster}, given, CHOICES)
    best, room = outcome.result.best[0], outcome.space.cluster.memory.gib
    lines = [
        f"{'auto':<12} {' '.join(overrides_of(best.plan))}",
        f"{'':<12} fastest of {quantity(outcome.result.layouts, 'layout')} on {devices} x {cluster['name']}: expected "
        f"step time {best.time.total:.3g} s, memory {best.peak_gib:.3g} of {room:g} GiB",
    ]
    same = ties(outcome)
    for number, other in enumerate(outcome.result.best[1:], 1):
        changes = " ".join(overrides_of(other.plan, best.plan))
        slower = other.time.total / best.time.total - 1
        tie = " (too close to call)" * (number < same)
        lines.append(f"{'':<12} {slower:+.1%} time{tie}, {other.peak_gib:.3g} GiB: {changes}")
    return with_plan(values, best.plan), lines


def with_plan(values: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the configuration with the layout of a plan."""
    chosen = {name: {**values[name], **group} for name, group in grouped(plan).items()}
    chosen["parallel"]["layouts"] = []
    return {**values, **chosen}


def require_cluster(folder: Path, values: Mapping[str, Any], what: str) -> ClusterConfig:
    """Return the cluster of a configuration; raise UserError if it has none, naming `what` needs it."""
    if values.get("cluster") is None:
        raise UserError(
            f"{what} needs the description of a cluster: set cluster=NAME, where NAME is one of "
            f"{', '.join(cluster_names(folder))}, or measure this machine with "
            "tools/calibrate.py --output mine.yaml and set cluster=mine.yaml"
        )
    return cluster_in(values["cluster"])


def prepare_choice(
    folder: Path, values: Mapping[str, Any], given: Set[str], launch: Launch
) -> tuple[RunConfig, Callable[..., tuple[dict[str, Any], list[str]]]]:
    """Return the checked configuration of a run with `parallel=auto`, and the function that chooses its layout."""
    cluster = require_cluster(folder, values, "parallel=auto")
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    devices, node = (cluster.devices, cluster.node) if values.get("dry_run") else (launch.world, launch.local_world)
    return config, partial(choose_automatically, values, given, devices, node)
