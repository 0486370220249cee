"""What the launcher (torchrun, or nothing at all) says about this process and its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pangu.config.errors import UserError

if TYPE_CHECKING:  # a command that only composes asks for its rank, and does without torch
    import torch


@dataclass(frozen=True)
class Launch:
    """A process of the run. A plain `python pretrain.py` is the only one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    attempt: int = 0
    """How often the launcher has restarted the processes (`--max-restarts`); 0 if each start meets elsewhere."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        names = {
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world": "LOCAL_WORLD_SIZE",
            "attempt": "TORCHELASTIC_RESTART_COUNT",
        }
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            del names["attempt"]  # launchers that have joined at different times count differently
        return cls(**{field: int(environment[name]) for field, name in names.items() if name in environment})


def choose_device(requested: str, launch: Launch) -> torch.device:
    """The device of this process; sets the number of its CPU threads too. Raises UserError if the machine lacks the
    requested kind or has fewer devices than local processes."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = requested if requested != "auto" else (accelerator.type if accelerator else "cpu")
    # torchrun gives each process one thread, whatever the number of cores; beside an accelerator they compute first
    # weights, and updates of state on the host
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world))
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        raise UserError(f"train.device = {requested}: this machine has no {kind} device; train.device=cpu works")
    if launch.local_world > torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise UserError(
            f"--nproc-per-node = {launch.local_world}: this machine has {count} {kind} device(s) and each process "
            f"needs its own; at most --nproc-per-node={count} works"
        )
    device = torch.device(kind, launch.local_rank)
    torch.accelerator.set_device_index(launch.local_rank)
    return device
