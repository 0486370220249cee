"""What the launcher (torchrun, or nothing at all) says about this process and its machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pangu.config.cores import cpu_quota
from pangu.config.errors import LocalError, UserError, shown

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
        """Read the launcher's variables. Raises LocalError if they contradict each other, or if a launcher of others
        (`SINGLE`) has started several processes that would not know of each other."""
        names = {
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world": "LOCAL_WORLD_SIZE",
            "attempt": "TORCHELASTIC_RESTART_COUNT",
        }
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            del names["attempt"]  # launchers that have joined at different times count differently
        launch = cls(**{field: _natural(environment, name) for field, name in names.items() if name in environment})
        launch._check(environment)
        return launch

    def _check(self, environment: Mapping[str, str]) -> None:
        given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
        if len(given) == 1:
            rule = "a launcher sets RANK and WORLD_SIZE together"
            raise LocalError(f"{given[0]} = {environment[given[0]]}: {rule}; {_WORKS.format(given[0])}")
        for rank, world, names in (
            (self.rank, self.world, ("RANK", "WORLD_SIZE")),
            (self.local_rank, self.local_world, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        ):
            if rank >= world and all(name in environment for name in names):
                raise LocalError(f"{names[0]} = {rank}: must be less than {names[1]} = {world}")
        for program, (size, rank_name, *signs) in SINGLE.items():
            number = environment.get(size, "")
            if not given and rank_name in environment and number.isdecimal() and int(number) > 1:
                # Slurm's batch script, which runs once, has the first two variables as well
                if signs and environment[rank_name] == "0" and not any(sign in environment for sign in signs):
                    continue
                raise LocalError(
                    f"{program} has started {number} processes ({size}) that know nothing of each other: start one "
                    "on each node, torchrun or scripts/launch.py, as scripts/slurm/pretrain.sbatch does"
                )


SINGLE = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
"""Programs that start processes without torchrun's variables -> their variables for the number of processes and the
rank, and those that their processes alone have."""
_WORKS = "torchrun sets it; `unset {0}` starts a run of one process"


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process speaks for all, before anything else of the environment is looked at."""
    return environment.get("RANK", "0") == "0"


def _natural(environment: Mapping[str, str], name: str) -> int:
    """Return a variable as a number. Raises LocalError."""
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise LocalError(f"{name} = {shown(text)}: must be an integer from 0 on; {_WORKS.format(name)}")
    return int(text)


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


def choose_device(
    requested: str, launch: Launch, environment: Mapping[str, str] = os.environ, threads: int | None = None
) -> torch.device:
    """Return the device of this process, and set the number of its CPU threads (None: `num_threads`). Raises UserError
    if the machine lacks the requested kind or has fewer devices than local processes.

    A scheduler may show each process a device of its own alone (SLURM's `--gpus-per-task=1`, torchrun's
    `--virtual-local-rank`), which is the first one to all of them.
    """
    load_torch(requested)
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = requested if requested != "auto" else (accelerator.type if accelerator else "cpu")
    torch.set_num_threads(threads or num_threads(launch.local_world, environment))
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


def num_threads(local_world: int, environment: Mapping[str, str]) -> int:
    """Return the CPU threads of a process: the user's OMP_NUM_THREADS, otherwise its share of the launcher's cores, as
    far as it may run on them (`--numa-binding`) and the container's quota goes. torchrun gives each process one,
    whatever the number of cores; beside an accelerator they compute first weights, and updates of state on the host."""
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # OpenMP takes one for each nested level
    if given.isdecimal() and int(given) and (given != "1" or _is_users_choice("OMP_NUM_THREADS", environment)):
        return int(given)
    allowed = len(os.sched_getaffinity(0))
    try:
        of_launcher = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # it is another user's, or gone
        of_launcher = allowed
    cores = min(max(allowed, of_launcher), cpu_quota())
    return max(1, min(allowed, math.floor(cores / local_world)))


def _is_users_choice(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether a variable was there before the launcher, which sets it where it is not."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return True
    with suppress(OSError):  # it is gone, or another user's, or this system does not show it
        return f"\0{name}=".encode() in b"\0" + Path("/proc", str(os.getppid()), "environ").read_bytes()
    return False
