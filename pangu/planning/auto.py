"""`parallel=auto`: the planner chooses the layout of a run, for the devices that are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pangu.config.checks import find_problems
from pangu.config.cluster import ClusterConfig, cluster_in
from pangu.config.errors import ConfigError, Problem, UserError, shown
from pangu.models.parameters import count_frozen
from pangu.planning.cluster import cluster_names, load_cluster
from pangu.planning.plan import Plan
from pangu.planning.search import KEYS, keys_of, search, space_of
from pangu.planning.search_report import Outcome, overrides_of, refusals
from pangu.topology.launch import Launch

_NOT_SEARCHED = {"parallel.allowed", "parallel.layers"}
"""Keys of a layout that no layout which a search finds has."""
_CHOSEN = ("parallel", "batch", "memory")
"""Groups of a configuration that a layout sets."""
CHOICES = 3
"""Fastest layouts that are named."""
SAME_RATE = 0.9
"""Of the rate in a cluster's file a device reaches more, or it is another one of the same name: PCIe cards."""


def find_layouts(
    values: Mapping[str, Any],
    given: Set[str],
    top: int,
    tokens: float | None = None,
    note_progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """Search the `top` fastest layouts of a configuration on its `cluster`.

    Args:
        values: the composed configuration.
        given: keys that are kept as they are.
        top: how many layouts.
        tokens: tokens of the whole run, for days and energy.
        note_progress: called after each dry run.

    Raises:
        ConfigError: if the configuration is wrong, or gives what a search cannot keep; UserError if no layout fits.
    """
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    count_frozen(config.model, config.train.frozen)
    rule = "the planner chooses among layouts without it"
    works = "leave it out, or take parallel=data, not parallel=auto"
    if lost := {key: value for key in _NOT_SEARCHED & given if (value := attrgetter(key)(config))}:
        raise ConfigError([Problem(*one, rule, works) for one in lost.items()])
    assert config.cluster is not None
    fixed = {field: attrgetter(key)(config) for field, key in KEYS.items() if key in given}
    space = space_of(config, cluster_in(config.cluster), fixed, note_progress)
    result = search(space, top)
    if not result.best:
        kept = "".join(f" and {KEYS[field]}={shown(value)}" for field, value in fixed.items())
        raise UserError(
            f"no valid layout for {space.cluster.devices} devices with {space.cluster.memory.gib:g} GiB each{kept}: "
            f"{refusals(result.refused) or 'the degrees do not multiply to the number of devices'}; more devices, "
            "a larger batch or fewer fixed keys may work"
        )
    return Outcome(space, result, tokens)


def choose_automatically(
    values: Mapping[str, Any],
    given: Set[str],
    devices: int,
    node: int,
    note_progress: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with the layout that the planner expects to be the fastest, and lines that say which it
    is and why.

    Args:
        values: the composed configuration, with `parallel.auto`.
        given: keys from the command line, which are kept.
        devices: number of those that take part.
        node: how many of them a node has.
        note_progress: called after each dry run.
    """
    cluster = {**values["cluster"], "devices": devices, "node": min(node, devices)}
    outcome = find_layouts({**values, "cluster": cluster}, given, CHOICES, note_progress=note_progress)
    best, room = outcome.result.best[0], outcome.space.cluster.memory.gib
    lines = [
        f"{'auto':<12} {' '.join(overrides_of(best.plan))}",
        f"{'':<12} the fastest of {outcome.result.layouts:,} layouts on {devices} x {cluster['name']}: a step of "
        f"{best.time.total:.3g} s and {best.fullest:.3g} of {room:g} GiB are expected",
    ]
    for other in outcome.result.best[1:]:
        slower = other.time.total / best.time.total - 1
        lines.append(f"{'':<12} {slower:+.1%} time, {other.fullest:.3g} GiB: {difference(best.plan, other.plan)}")
    return with_plan(values, best.plan), lines


def with_plan(values: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the configuration with a layout."""
    chosen = {group: dict(values[group]) for group in _CHOSEN}
    for key, value in keys_of(plan).items():
        group, _, name = key.partition(".")
        chosen[group][name] = value
    chosen["parallel"] |= {"layers": None, "allowed": []}
    return {**values, **chosen}


def difference(plan: Any, other: Any) -> str:
    """Return the keys of `other` with other values than in `plan`."""
    before = keys_of(plan)
    return " ".join(f"{key}={shown(value)}" for key, value in keys_of(other).items() if before[key] != value)


def given_keys(words: Iterable[str]) -> set[str]:
    """Return the keys that words of a command line set, also as groups: `memory={recompute: full}`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    keys, settings = set(), [word for word in words if "=" in word and not word.startswith("-")]
    for override in OverridesParser.create().parse_overrides(settings):
        value, key = override.value(), override.key_or_group
        keys |= {f"{key}.{name}" for name in value} if isinstance(value, Mapping) else {key}
    return keys


class Planned(NamedTuple):
    """Configuration with the layout that `parallel=auto` stands for."""

    values: Mapping[str, Any]
    lines: list[str]
    """Log lines that say which layout was chosen, and why."""
    meeting: Any = None
    """Mesh in which the processes agreed. Keep it until the run has its own: the first process may serve its store."""


def plan_layout(folder: Path, values: Mapping[str, Any], given: Set[str], launch: Launch) -> Planned:
    """Choose the layout of a run: the first process counts and searches, all others take what it has chosen.

    Args:
        folder: configs/cluster/.
        values: the composed configuration, with `parallel.auto`.
        given: keys from the command line, which are kept.
        launch: of this process.

    Raises:
        UserError: if nothing says for which devices, or if no layout fits.
    """
    cluster = require_cluster(folder, values, "parallel=auto")
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    devices, node = (cluster.devices, cluster.node) if values.get("dry_run") else (launch.world, launch.local_world)
    choose = partial(choose_automatically, values, given, devices, node)
    if launch.world == 1:
        return Planned(*choose())
    # these import torch; a plan does without
    from pangu.collectives.agreement import meet_all, name_silent_ranks
    from pangu.collectives.long_work import agree_on_long_work
    from pangu.topology.mesh import Mesh

    mesh = Mesh.without_layout(launch.world, config.parallel.timeout_s, launch.attempt)
    with name_silent_ranks(mesh, lambda: "choosing a layout"):
        chosen = agree_on_long_work(mesh, "choosing a layout", choose, runs_here=mesh.is_first)
        shared = [({key: one[key] for key in _CHOSEN}, lines) for one, lines in filter(None, chosen)]
        layout, lines = meet_all(mesh, shared, lambda of_all: of_all[0][0])
    return Planned({**values, **layout}, lines, mesh)


def require_cluster(folder: Path, values: Mapping[str, Any], what: str) -> ClusterConfig:
    """Return the cluster of a configuration. Raises UserError if it has none, which `what` needs."""
    if values.get("cluster") is None:
        raise UserError(
            f"{what} needs to know for which devices: cluster=NAME says so, where NAME is one of "
            f"{', '.join(cluster_names(folder))}; tools/calibrate.py --output {folder}/mine.yaml makes one of the "
            "machine it runs on, for cluster=mine"
        )
    return cluster_in(values["cluster"])


def with_cluster_here(folder: Path, values: Mapping[str, Any], launch: Launch, planned: bool) -> Mapping[str, Any]:
    """Return a configuration that is to be run, with the accelerators here as its cluster unless it names one.

    Args:
        folder: configs/cluster/.
        values: the composed configuration, which nobody has checked yet.
        launch: of this process.
        planned: a plan is asked for. Otherwise nobody is told of a broken file: the run goes on without a forecast.

    Raises:
        UserError: if a file of `folder` that a plan needs is broken.
    """
    train = values.get("train")
    on_host = isinstance(train, Mapping) and train.get("device") == "cpu"
    if values.get("cluster") is not None or values.get("dry_run") or on_host:
        return values
    with suppress(*() if planned else (UserError,)):
        return {**values, "cluster": cluster_here(folder, launch)}
    return values


def cluster_here(folder: Path, launch: Launch) -> dict[str, Any] | None:
    """Return the file of configs/cluster/ that describes the accelerators here, for all that take part, with the memory
    of this process's one; None: there is none. Raises UserError if the file is broken."""
    from pangu.metrics.devices import peak_tflops  # which imports torch; a plan does without

    device = device_here(launch)
    name = None if device is None else cluster_of_device(device.name, cluster_names(folder, whole=True))
    if device is None or name is None:
        return None
    cluster, tflops = load_cluster(folder / f"{name}.yaml"), peak_tflops(device.name, "fp16")
    if tflops is not None and tflops < SAME_RATE * cluster.matmul.tflops:
        return None
    memory = replace(cluster.memory, gib=device.total_memory / 2**30)
    return asdict(replace(cluster, memory=memory, devices=launch.world, node=launch.local_world))


def device_here(launch: Launch) -> Any:
    """Return the properties (`name`, `total_memory` in bytes) of this process's accelerator, without taking any of its
    memory; None: there is none, or torch does not tell of its kind (Apple's)."""
    import torch

    kind = torch.accelerator.current_accelerator()
    ask = None if kind is None else getattr(torch.get_device_module(kind), "get_device_properties", None)
    return None if ask is None or launch.local_rank >= torch.accelerator.device_count() else ask(launch.local_rank)


def cluster_of_device(name: str, files: Collection[str]) -> str | None:
    """Return the file named by a word of a device's name, such as `NVIDIA H100 80GB HBM3`; None if there is none. A
    part of a device, which NVIDIA calls MIG, is another device."""
    words = re.split(r"[\s_-]+", name.lower())
    return None if "mig" in words else next((file for file in files if file in words), None)
