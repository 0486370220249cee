"""Dry run of all roles of a run, as data: the device with the highest peak, whether it fits, each role."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pangu.common.errors import ConfigError, Problem
from pangu.config.cluster import cluster_in
from pangu.config.schema import RunConfig
from pangu.dryrun.roles import role_ranks, run_jobs
from pangu.pipeline.layouts import choose_layout

_GIB = 2**30


def dry_run_roles(values: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the roles of a run, one per stage (`dry_run=all`: each distinct one).

    Args:
        values: the composed configuration as plain dictionaries.

    Returns:
        The `run.RankReport` of the device with the highest peak, its `fits` and `room_bytes` on the configuration's
        cluster (None without one), `seconds`, `compile` (not covered by a dry run), and `roles`: the same for each.

    Raises:
        UserError: if the configuration is invalid.
    """
    began = time.perf_counter()
    config, layout, _ = choose_layout(values, 1)
    require_kernels(config)
    roles = list(run_jobs([(values, rank) for rank in role_ranks(layout, config.dry_run == "all")]))
    for role in roles:
        role |= _fit(config, role)
    fullest = max(roles, key=lambda role: role["needed_bytes"])
    return {**fullest, "seconds": time.perf_counter() - began, "compile": config.compile, "roles": roles}


def require_kernels(config: RunConfig) -> None:
    """Raise ConfigError if the configuration requests a kernel that no dry run can carry out."""
    if config.model.attention == "flash_attn":
        rule = "a dry run cannot run a kernel of an external package"
        fix = "set model.attention=auto, which needs the same memory where both are fused"
        raise ConfigError([Problem("model.attention", config.model.attention, rule, fix)])


def _fit(config: RunConfig, role: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory that the device needs including non-tensor memory, and the room that remains."""
    if config.cluster is None:
        return {"cluster": None, "needed_bytes": role["peak"], "fits": None, "room_bytes": None}
    cluster = cluster_in(config.cluster)
    needed = role["peak"] + round(cluster.memory.overhead_gib(role["groups"]) * _GIB)
    room = round(cluster.memory.gib * _GIB) - needed
    return {"cluster": cluster.name, "needed_bytes": needed, "fits": room >= 0, "room_bytes": room}
