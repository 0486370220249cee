"""Planner and dry run as `pretrain.py` uses them, for runs that plan, forecast or dry-run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pangu.collectives.agreement import agree_on_long_work, answer_all, report_unresponsive_ranks
from pangu.common.errors import UserError
from pangu.metrics.devices import device_here, peak_tflops
from pangu.report.auto import CHOSEN_GROUPS, prepare_choice
from pangu.report.clusters import cluster_names, cluster_of_device, load_cluster
from pangu.report.dry_run import show_dry_run
from pangu.report.forecast import forecast_run
from pangu.topology.launch import Launch
from pangu.topology.mesh import Mesh

__all__ = ["cluster_here", "forecast_run", "plan_layout", "show_dry_run", "with_cluster_here"]

SAME_RATE = 0.9
"""Fraction of its file's rate that a device must reach: slower ones of the same name are others, e.g. PCIe cards."""


def plan_layout(
    folder: Path, values: Mapping[str, Any], given: Set[str], launch: Launch
) -> tuple[Mapping[str, Any], list[str], Mesh | None]:
    """Choose the layout of a run as `prepare_choice` says: the first process searches, all others take its choice.

    Returns:
        The configuration with the layout that `parallel=auto` stands for, log lines that say why, and the mesh in which
        the processes agreed. Keep it until the run has its own: the first process may serve its store.
    """
    config, choose = prepare_choice(folder, values, given, launch)
    if launch.world == 1:
        return (*choose(), None)
    mesh = Mesh.without_layout(launch.world, config.parallel.timeout_s, launch.attempt)
    with report_unresponsive_ranks(mesh, lambda: "choosing a layout"):
        chosen = agree_on_long_work(mesh, "choosing a layout", choose, runs_here=mesh.is_first)
        shared = [({key: one[key] for key in CHOSEN_GROUPS}, lines) for one, lines in filter(None, chosen)]
        layout, lines = answer_all(mesh, shared, lambda answers: answers[0][0])
    return {**values, **layout}, lines, mesh


def with_cluster_here(folder: Path, values: Mapping[str, Any], launch: Launch, planned: bool) -> Mapping[str, Any]:
    """Return a run's configuration with this machine's accelerators as its cluster, unless it names one.

    Args:
        folder: configs/cluster/.
        values: the composed configuration, not checked yet.
        launch: rank and size of this process in the run.
        planned: whether a plan is asked for. Without a plan, a broken file only costs the forecast.

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
    """Return the file of configs/cluster/ that describes the accelerators here, or None if there is none.

    It counts the devices of all ranks, with the memory of this process's device. Raise `UserError` if it is broken.
    """
    device = device_here(launch)
    name = None if device is None else cluster_of_device(device.name, cluster_names(folder, whole=True))
    if device is None or name is None:
        return None
    cluster, tflops = load_cluster(folder / f"{name}.yaml"), peak_tflops(device.name, "fp16")
    if tflops is not None and tflops < SAME_RATE * cluster.matmul.tflops:
        return None
    memory = replace(cluster.memory, gib=device.total_memory / 2**30)
    return asdict(replace(cluster, memory=memory, devices=launch.world, node=launch.local_world))
