"""What the backends of devices, NCCL and HCCL, are told. None of this has been timed: only devices can show what
priorities and blocks are worth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pangu.topology.experts import GROUPS as EXPERT_GROUPS
from pangu.topology.launch import ALLOCATOR, GROWING

URGENT = ("tensor", "messages")
"""Axes whose communication is waited for as soon as it is sent: their kernels go before those of other streams."""
MESSAGE_CTAS = 4
"""Blocks of a device, at most, that a message between stages takes from what computes beside it."""
WARMED = ("world", "tensor", "context", "replicas", "shard", "gather", "copies", *EXPERT_GROUPS)
"""Groups that every run sends in which has them."""
SHOWN = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "HCCL_", *ALLOCATOR)
"""Beginnings of the names of variables that the start of a run shows."""
RECORDED_COLLECTIVES = 2000
"""The last ones of each process: some steps' worth, a few hundred KiB."""


def backend_of(device: torch.device) -> str:
    """The collective backend of a kind of device: gloo, nccl, or what its plug-in has registered, for `npu` hccl."""
    return dist.get_default_backend_for_device(device)


def group_options(axis: str, timeout: timedelta) -> Any:
    """Of NCCL, for a group along an axis of `Layout.peers`, or one of `messages` between stages."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=axis in URGENT)
    options._timeout = timeout  # or torch warns that the group's is another
    if axis == "messages":
        options.config.max_ctas = MESSAGE_CTAS
    return options


def connect_groups(groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> None:
    """Let groups connect now, in one order everywhere. Otherwise each does at its first collective, within a step."""
    for axis in WARMED:
        if axis in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=groups[axis])


@contextmanager
def record_collectives(folder: Path, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Within the block, in which groups are made, NCCL remembers every process's last collectives, and writes them to
    `folder`/collectives-RANK, which torch's flight-recorder tools read, when one does not end in time. What the user
    has set stays, also under the name that a variable had before: torch takes the newer one if both are there."""
    defaults = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(RECORDED_COLLECTIVES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(folder.absolute() / "collectives-"),
    }
    missing = {names[0]: value for names, value in defaults.items() if environment.keys().isdisjoint(names)}
    environment.update(missing)
    try:
        yield
    finally:
        for name in missing:  # a sweep's next run, in this process, has another folder
            environment.pop(name, None)


def describe_environment(given: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> str:
    """In words, what the allocator and the backend are told: defaults of pangu, and what the user has `given`."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"{name}={environment[name]}" for name in sorted(names))

    variables = {name for name in environment if name.startswith(SHOWN)}
    defaults = {name for name in variables if given.get(name) in (None, GROWING)}
    parts = (("default", defaults), ("yours", variables - defaults))
    return "; ".join(f"{whose}: {listed(names)}" for whose, names in parts if names) or "nothing is set"
