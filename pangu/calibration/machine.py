"""Figures of the machine that this runs on, as a cluster's configuration."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pangu.calibration.clock import Clock
from pangu.calibration.kernels import measure_launch, measure_matmuls, measure_memory
from pangu.calibration.links import measure_link, measure_messages, measure_overlap
from pangu.calibration.steps import measure_steps
from pangu.config.cluster import ClusterConfig, LinkConfig
from pangu.layers.cpu import precisions
from pangu.topology.launch import Launch


def measure_machine(
    clock: Clock, base: ClusterConfig, launch: Launch, quick: bool, configs: Path
) -> tuple[ClusterConfig, list[str]]:
    """Return the figures of this machine, and the names of those that come from `base` unmeasured.

    All processes call this together. quick: measure few shapes, once each. configs: folder of the configurations.
    """
    on_host, world, node = clock.on_host, launch.world, launch.local_world
    dtype = torch.float32 if on_host else torch.bfloat16
    if on_host:
        torch.set_float32_matmul_precision(precisions("auto", "fp32", clock.device)[-1])
    matmul = measure_matmuls(clock, base.matmul, dtype, quick)
    bandwidth = measure_memory(clock) / 1e9
    memory = replace(base.memory, gb_s=max(base.memory.gb_s, bandwidth))
    if on_host:
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / node
        memory = replace(memory, gb_s=bandwidth, gib=gib, context_gib=0.2, workspace_gib=0.0, communicator_gib=0.0)
    memory = replace(memory, efficiency=min(1.0, bandwidth / memory.gb_s))
    borrowed = ["price", "host_gb_s", "memory.fragmentation", "matmul.alignment"]
    borrowed += [] if on_host else ["host_memory_gb_s", "operator_us", "call_us"]
    borrowed += [] if on_host and not quick else ["step_us", "message_us"]
    inside, between, overlap = base.inside, base.between, base.overlap
    if world > 1:
        if node > 1:
            groups = {size: _neighbours(size, world) for size in range(2, node + 1) if node % size == 0}
            inside = measure_link(clock, groups, base, quick)
            inside = replace(inside, measured=(*inside.measured, *measure_messages(clock, world, quick)))
        overlap = measure_overlap(clock, dtype)
    else:
        borrowed += ["inside", "overlap"]
    if world > node:
        whole = measure_link(clock, {world: None}, base, quick)
        between = LinkConfig(whole.latency_us, whole.gb_s * node / base.nics)
    else:
        borrowed.append("between")
    launch_us = measure_launch(clock) * 1e6
    cluster = replace(
        base,
        devices=world,
        node=node,
        matmul=matmul,
        memory=memory,
        inside=inside,
        between=between,
        overlap=overlap,
        launch_us=launch_us,
        # a host's launches hold all of its time
        operator_us=0.0 if on_host else base.operator_us,
        call_us=0.0 if on_host else base.call_us,
        host_memory_gb_s=bandwidth if on_host else base.host_memory_gb_s,
        step_us=1000.0 if on_host else base.step_us,
    )
    if on_host and not quick:
        cluster = measure_steps(clock, cluster, configs)
        cluster = replace(cluster, message_us=0.0, alone=clock.crowding)
    return cluster, borrowed


def _neighbours(node: int, world: int) -> dist.ProcessGroup | None:
    """Return the group of this process's neighbors, `node` of the `world` processes; None if these are all."""
    if node == world:
        return None
    groups = [dist.new_group(list(range(first, first + node))) for first in range(0, world, node)]
    return groups[dist.get_rank() // node]
