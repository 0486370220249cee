"""`parallel=auto`: the planner chooses the layout of a run, for the devices that are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pangu.config.checks import find_problems
from pangu.config.errors import ConfigError, UserError
from pangu.config.schema import RunConfig
from pangu.planning.cluster import cluster_in, load_clusters
from pangu.planning.search import search, space_of
from pangu.planning.search_report import Outcome, keys_of, overrides_of, refusals
from pangu.topology.launch import Launch, choose_device

SEARCHED = {
    "parallel.tensor": "tensor",
    "parallel.pipeline": "pipeline",
    "parallel.virtual": "virtual",
    "parallel.schedule": "schedule",
    "parallel.sequence": "sequence",
    "parallel.zero": "zero",
    "batch.micro_size": "micro_size",
    "memory.recompute": "recompute",
    "memory.offload": "offload",
    "parallel.zero_group": "shards",
    "parallel.data": "data",
}
"""Keys that a search tries all values of unless they are given, and the fields of a plan."""


def find_layouts(values: Mapping[str, Any], given: Collection[str], top: int, tokens: float | None = None) -> Outcome:
    """Search the layouts of a configuration on its `cluster`.

    Args:
        values: the composed configuration.
        given: keys that are kept as they are.
        top: how many layouts.
        tokens: of the whole run, for days and energy.

    Raises:
        ConfigError: if the configuration is wrong; UserError if no layout fits.
    """
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    assert config.cluster is not None
    space = space_of(config, cluster_in(config.cluster), fixed_fields(config, given))
    found = search(space, top)
    if not found.best:
        raise UserError(
            f"no layout of {space.cluster.devices} devices of {space.cluster.memory.gib:g} GiB can be: "
            f"{refusals(found.refused)}; more devices, a larger batch or fewer fixed keys may work"
        )
    return Outcome(space, found, tokens)


def fixed_fields(config: RunConfig, given: Collection[str]) -> dict[str, Any]:
    """Fields of a plan that the given keys fix."""
    groups = {"parallel": config.parallel, "batch": config.batch, "memory": config.memory}
    return {
        field: getattr(groups[key.partition(".")[0]], key.partition(".")[2])
        for key, field in SEARCHED.items()
        if key in given
    }


def choose_automatically(
    values: Mapping[str, Any], given: Collection[str], devices: int, node: int
) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the layout that the planner expects to be the fastest.

    Args:
        values: the composed configuration, with `parallel.auto`.
        given: keys from the command line, which are kept.
        devices: that take part.
        node: how many of them a node has.

    Returns:
        The configuration, and what was chosen and why, in lines.
    """
    cluster = {**values["cluster"], "devices": devices, "node": min(node, devices)}
    outcome = find_layouts({**values, "cluster": cluster}, given, top=3)
    best, *others = outcome.found.best
    chosen = {group: dict(values[group]) for group in ("parallel", "batch", "memory")}
    for key, value in keys_of(best.plan).items():
        group, _, name = key.partition(".")
        chosen[group][name] = value
    chosen["parallel"].update(layers=None, allowed=[])
    room = outcome.space.cluster.memory.gib
    lines = [
        f"{'auto':<12} {' '.join(overrides_of(best.plan))}",
        f"{'':<12} the fastest of {outcome.found.layouts:,} layouts on {devices} x {cluster['name']}: a step of "
        f"{best.time.total:.3g} s and {best.fullest:.3g} of {room:g} GiB are expected",
    ]
    for other in others:
        slower = other.time.total / best.time.total - 1
        lines.append(f"{'':<12} {slower:+.1%} time, {other.fullest:.3g} GiB: {difference(best.plan, other.plan)}")
    return {**values, **chosen}, lines


def difference(plan: Any, other: Any) -> str:
    """The keys of `other` that are not those of `plan`."""
    before = keys_of(plan)
    return " ".join(f"{key}={value}" for key, value in keys_of(other).items() if before[key] != value)


def given_keys(overrides: Collection[str]) -> set[str]:
    """The keys that words of a command line set."""
    return {word.lstrip("+").partition("=")[0] for word in overrides if "=" in word}


def plan_layout(
    folder: Path, values: Mapping[str, Any], overrides: Collection[str], launch: Launch
) -> tuple[Mapping[str, Any], list[str]]:
    """What `parallel=auto` stands for, and why. `folder`: configs/cluster/.

    Raises:
        UserError: if nothing says for which devices, or if no layout fits.
    """
    if values["cluster"] is None:
        names = ", ".join(load_clusters(folder))
        raise UserError(
            f"parallel=auto: no file of {folder} is for the devices here; cluster=NAME says for which to plan (one of "
            f"{names}); tools/calibrate.py --output {folder}/mine.yaml makes one for cluster=mine"
        )
    cluster = cluster_in(values["cluster"])
    devices, node = (cluster.devices, cluster.node) if values["dry_run"] else (launch.world, launch.local_world)
    return choose_automatically(values, given_keys(overrides), devices, node)


def cluster_here(folder: Path, device: str, launch: Launch) -> dict[str, Any] | None:
    """The file of configs/cluster/ that describes the accelerators of this process, for all that take part; None: there
    is none. `device`: `train.device`."""
    from pangu.metrics.devices import device_name  # which imports torch; a plan does without

    clusters = load_clusters(folder)
    name = cluster_of_device(device_name(choose_device(device, launch)), clusters)
    if name is None:
        return None
    return {**asdict(clusters[name]), "devices": launch.world, "node": launch.local_world}


def cluster_of_device(name: str, files: Collection[str]) -> str | None:
    """The file that describes a device, e.g. `NVIDIA H100 80GB HBM3`; None if there is none."""
    matching = [file for file in files if file in name.lower().replace(" ", "")]
    return max(matching, key=len, default=None)
