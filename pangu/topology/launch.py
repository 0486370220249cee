"""What the launcher (torchrun, or nothing at all) says about this process and its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
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


VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Kind of device -> variables that say which ones of its node a process sees."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
"""Names of one setting. torch_npu refuses to have it under two."""
PLUG_IN = "torch_npu"
"""Ascend's, which makes `npu` a device of torch."""
GROWING = "expandable_segments:True"


REMEMBERED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Shapes of products that oneDNN and torch's bridge to it keep kernels and buffers for, by default 1,024: experts have
other numbers of tokens in every step, and two layers of width 512 filled 0.8 GB."""


def choose_memory_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """What the user has not set: torch's allocator grows its segments, so that blocks of changing sizes leave no gaps;
    a CPU keeps kernels for few shapes. Before torch is imported."""
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = GROWING
    for name, capacity in REMEMBERED_SHAPES.items():
        environment.setdefault(name, capacity)


def load_torch(requested: object) -> None:
    """Import torch, and Ascend's plug-in where a device of the `requested` kind (`train.device`) may need it: torch
    does that by itself unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0. Raises UserError if either cannot be imported."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # which the first optimizer has torch make
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"torch cannot make this folder for compiled code ({error.strerror})"
            raise UserError(f"TORCHINDUCTOR_CACHE_DIR = {folder}: {rule}; another one works") from error
    try:
        import torch
    except RuntimeError as error:
        from pangu.topology.accelerator import not_imported

        raise not_imported(requested, error) from error
    finds_none = requested == "auto" and not torch.accelerator.is_available()
    if (requested == "npu" or (finds_none and find_spec(PLUG_IN) is not None)) and not hasattr(torch, "npu"):
        from pangu.topology.accelerator import load_plug_in

        load_plug_in(requested)


def choose_device(requested: str, launch: Launch, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this process; sets the number of its CPU threads too. Raises UserError if the machine lacks the
    requested kind or has fewer devices than local processes.

    A scheduler may show each process a device of its own alone (SLURM's `--gpus-per-task=1`, torchrun's
    `--virtual-local-rank`), which is the first one to all of them.
    """
    load_torch(requested)
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = requested if requested != "auto" else (accelerator.type if accelerator else "cpu")
    torch.set_num_threads(num_threads(launch.local_world))
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        works = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        raise UserError(f"train.device = {requested}: this machine has no {kind} device; train.device={works} works")
    count = torch.accelerator.device_count()
    shown_alone = count == 1 and any(name in environment for name in VISIBLE.get(kind, ()))
    if launch.local_world > count and not shown_alone:
        raise UserError(
            f"--nproc-per-node = {launch.local_world}: this machine has {count} {kind} device(s) and each process "
            f"needs its own; at most --nproc-per-node={count} works"
        )
    device = torch.device(kind, 0 if shown_alone else launch.local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


def num_threads(local_world: int) -> int:
    """CPU threads of a process: its share of the launcher's cores, as far as it may run on them (`--numa-binding`).
    torchrun gives each process one, whatever the number of cores; beside an accelerator they compute first weights, and
    updates of state on the host."""
    allowed = len(os.sched_getaffinity(0))
    try:
        of_launcher = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # it is another user's, or gone
        of_launcher = allowed
    return max(1, min(allowed, max(allowed, of_launcher) // local_world))
