"""Report of a dry run as text and data: the device with the highest peak, whether it fits, each role."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from pangu.common.errors import ConfigError, Problem
from pangu.config.cluster import cluster_in
from pangu.config.schema import RunConfig
from pangu.dryrun.roles import run_jobs
from pangu.metrics.text import quantity, size
from pangu.pipeline.layouts import choose_layout
from pangu.topology.layout import Coordinates, Layout

WIDTH = 200
"""Width in columns of tables where the output is not a terminal."""


def role_ranks(layout: Layout, every: bool) -> list[int]:
    """Return one rank per stage; with `every`, both ends of the tensor, context and data-parallel ranks of each."""
    sizes = (layout.data, layout.tensor, layout.context)
    ends = [{0, size - 1} if every else {0} for size in sizes]
    places = [Coordinates(stage, *place) for stage in range(layout.pipeline) for place in product(*ends)]
    return sorted({layout.rank(place) for place in places})


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
    roles = list(run_jobs([(values, rank, {}) for rank in role_ranks(layout, config.dry_run == "all")]))
    for role in roles:
        role |= _fit(config, role)
    peak = max(roles, key=lambda role: role["needed_bytes"])
    return {**peak, "seconds": time.perf_counter() - began, "compile": config.compile, "roles": roles}


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
    needed = role["peak"] + round(cluster.memory.overhead_gib(role["groups"]) * 2**30)
    room = round(cluster.memory.gib * 2**30) - needed
    return {"cluster": cluster.name, "needed_bytes": needed, "fits": room >= 0, "room_bytes": room}


def print_dry_run(console: Console, layout: Layout, report: Mapping[str, Any], every: bool) -> None:
    """Print the report of a dry run; with `every`, also a table of all roles."""
    for name, text in _rows(layout, report):
        console.print(f"{name:<12} {text}", markup=False, highlight=False, soft_wrap=True)
    if not every:
        return
    heads = ("rank", "stage", "tensor", "replica", "peak", "needs", "launches", "reads", "copies", "races")
    table = Table(*heads, box=None, header_style="italic", pad_edge=False)
    for role in report["roles"]:
        counts = (sum(role[key].values()) for key in ("host_syncs", "blocking_copies", "races"))
        row = (*(role[head] for head in heads[:4]), size(role["peak"]), size(role["needed_bytes"]), role["launches"])
        table.add_row(*map(str, (*row, *counts)))
    console.print()
    console.print(table)


def _rows(layout: Layout, report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if report["device"] is not None:
        yield "no device", f"{report['device']}: counted on CPU tensors, without a device's kernels and copies"
    if report["compile"]:
        given = str(report["compile"]).lower()
        yield "not seen", f"compile={given}: counted without compilation, with more launches and memory traffic"
    roles = quantity(len(report["roles"]), "role")
    yield "dry run", f"{roles} of {quantity(layout.world, 'rank')} in {report['seconds']:.0f} s"
    kinds = ", ".join(f"{kind} {size(amount)}" for kind, amount in report["peak_bytes"].items() if amount)
    yield "each device", f"needs at most {size(report['peak'])} for tensors: {kinds}"
    yield "peak on", f"rank {report['rank']} (stage {report['stage']}), in {report['peak_place']}"
    for axis, kinds in report["collectives"].items():
        words = (f"{kind} {one['calls']:,} x, {size(one['bytes'])}" for kind, one in kinds.items())
        exposed = sum(one["bytes"] - one.get("hidden_bytes", 0) for one in kinds.values())
        yield f"over {axis}", "; ".join(words) + (f", {size(exposed)} exposed" if exposed else "")
    bound, flops = size(report["memory_bound_bytes"]), report["flops"]
    yield "step", f"{report['launches']:,} kernel launches, {bound} moved outside matmuls, {flops:.3g} FLOPs in matmuls"
    yield "host waits", _places(report["host_syncs"], "host sync", "host syncs")
    yield "blocked by", _places(report["blocking_copies"], "copy", "copies")
    yield "races", _places(report["races"], "race", "races")
    if report["findings"]:
        yield "wrong", _places(report["findings"], "operation", "operations")
    yield "memory", _fits(report)


def _places(counts: Mapping[str, int], one: str, several: str) -> str:
    total = sum(counts.values())
    where = "; ".join(f"{place} {count} x" for place, count in counts.items())
    return f"{total:,} {one if total == 1 else several}" + (f" ({where})" if where else "")


def _fits(report: Mapping[str, Any]) -> str:
    if report["cluster"] is None:
        return f"needs {size(report['needed_bytes'])} for tensors; set cluster=NAME to check whether that fits"
    groups = quantity(report["groups"], "communicator")
    needs = f"needs {size(report['needed_bytes'])} with context, workspaces and {groups}"
    fits, room = "fits" if report["fits"] else "does not fit", size(abs(report["room_bytes"]))
    rest = "left" if report["fits"] else "over the limit; shard or recompute more, or lower batch.micro_size"
    return f"{fits} on {report['cluster']}: {needs}, {room} {rest}"


def show_dry_run(values: Mapping[str, Any]) -> None:
    """Carry out and print a dry run for `pretrain.py ... dry_run=true`; raise UserError if that fails."""
    config, layout, _ = choose_layout(values, 1)
    # the stream of all other messages of a run
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    print_dry_run(console, layout, dry_run_roles(values), config.dry_run == "all")
