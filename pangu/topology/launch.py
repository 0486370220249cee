"""Process identity, device and environment settings, from the launcher's variables (torchrun's, or none)."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads
from types import ModuleType
from typing import TYPE_CHECKING

from pangu.common.cores import cpu_quota
from pangu.common.errors import LocalError, UserError, shown

if TYPE_CHECKING:  # composing a configuration needs the rank, but not torch, which a broken plug-in breaks
    import torch


@dataclass(frozen=True)
class Launch:
    """Rank and size of this process in the run; a plain `python pretrain.py` is a run of one process."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    attempt: int = 0
    """Number of restarts by the launcher (`--max-restarts`); 0 if every start uses a new store."""
    epoch: int = 0
    """Number of losses of ranks since the start that other processes have outlived (`topology.member`)."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read the launcher's variables; raise `LocalError` if they contradict each other.

        Also raised if a foreign launcher (`SINGLE`) has started several processes that do not know of each other.
        """
        names = {
            "rank": "RANK",
            "world": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_world": "LOCAL_WORLD_SIZE",
            "attempt": "TORCHELASTIC_RESTART_COUNT",
            **({"epoch": "PANGU_EPOCH"} if MEMBER in environment else {}),  # else of another run, or exported by hand
        }
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
            del names["attempt"]  # agents that joined at different times disagree on it
        launch = cls(**{field: _natural(environment, name) for field, name in names.items() if name in environment})
        launch._check(environment)
        return launch

    def _check(self, environment: Mapping[str, str]) -> None:
        given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
        if len(given) == 1:
            rule = "RANK and WORLD_SIZE must be set together"
            raise LocalError(f"{given[0]} = {environment[given[0]]}: {rule}; {_FIX.format(given[0])}")
        for rank, world, names in (
            (self.rank, self.world, ("RANK", "WORLD_SIZE")),
            (self.local_rank, self.local_world, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        ):
            if rank >= world and all(name in environment for name in names):
                raise LocalError(f"{names[0]} = {rank}: must be less than {names[1]} = {world}; use torchrun")
        for program, (size, rank_name, *signs) in SINGLE.items():
            number = environment.get(size, "")
            if not given and rank_name in environment and number.isdecimal() and int(number) > 1:
                # a Slurm batch script is a single process, but has the first two variables as well
                if signs and environment[rank_name] == "0" and not any(sign in environment for sign in signs):
                    continue
                raise LocalError(
                    f"{program} started {number} unconnected processes ({size}); start one launcher per node instead "
                    "(torchrun or scripts/launch.py), as scripts/slurm/pretrain.sbatch does"
                )


MEMBER = "PANGU_MEMBER"
"""Environment variable: number of this process among all members, `@`, and address of the launchers' store."""
SINGLE = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
"""Foreign launchers -> their variables for world size and rank, then variables that only their processes have."""
_FIX = "start with torchrun, which sets it, or `unset {0}` for a single process"


def is_first_process() -> bool:
    """Return whether this is rank 0, which speaks for all; works before the environment is validated."""
    return os.environ.get("RANK", "0") == "0"


def _natural(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise LocalError(f"{name} = {shown(text)}: must be a non-negative integer; {_FIX.format(name)}")
    return int(text)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
"""Names of the allocator setting in torch's releases and plug-ins; torch_npu rejects more than one of them."""
GROWING = "expandable_segments:True"
"""Allocator setting that avoids fragmentation by blocks of changing sizes."""


CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a CUDA device, read when CUDA starts (default 8, at most 32).

A rank has 10 to 12 streams; streams that share a queue start in the order of their launches, and wait for each other.
Megatron-LM sets 1 before Blackwell, so that a collective launched before a matmul also starts before it. Here the step
orders streams by events, and urgent collectives have a high priority.
"""
REMEMBERED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Cache capacities of oneDNN and torch's bridge to it, in matmul shapes (default 1,024)."""


# Experts see a different number of tokens in each step: two layers of width 512 filled 0.8 GB of these caches.
def choose_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the allocator, CUDA and oneDNN defaults that the user has not set; call before torch is imported."""
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = GROWING
    for name, value in (CONNECTIONS | REMEMBERED_SHAPES).items():
        environment.setdefault(name, value)


VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Device type -> variables that restrict which devices of the node a process sees."""
PLUG_IN = "torch_npu"
"""Plug-in package that registers Ascend's `npu` device type with torch."""


def load_torch(requested: object) -> ModuleType:
    """Import and return torch, with the Ascend plug-in if `requested` (`train.device`) needs it.

    Raise `UserError` if either import fails.
    """
    # torch loads plug-ins by itself unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # torch would create it in the first optimizer
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"torch cannot create this folder for compiled code ({error.strerror})"
            raise UserError(f"TORCHINDUCTOR_CACHE_DIR = {folder}: {rule}; set it to a writable folder") from error
    try:
        # after `choose_settings`, whose variables it reads; composing a configuration does without
        import torch  # noqa: PLC0415
    except RuntimeError as error:
        raise _not_imported(requested, error) from error
    finds_none = requested == "auto" and not torch.accelerator.is_available()
    if (requested == "npu" or (finds_none and find_spec(PLUG_IN) is not None)) and not hasattr(torch, "npu"):
        _load_plug_in(requested)
    return torch


def _load_plug_in(requested: object) -> None:
    """Import the Ascend plug-in of torch; raise `UserError` if it is missing or cannot be loaded."""
    if find_spec(PLUG_IN) is None:
        release = version("torch").partition("+")[0]
        raise UserError(
            f"train.device = {requested}: needs Ascend's plug-in for torch, which is not installed; pip install "
            f"{PLUG_IN}=={release} (the release of torch) and install Huawei's CANN, or set train.device=cpu"
        )
    try:
        import_module(PLUG_IN)
    except (ImportError, OSError, RuntimeError) as error:
        raise _not_imported(requested, error) from error


def _not_imported(requested: object, error: Exception) -> UserError:
    """Return the `UserError` for a failed import of torch or of the Ascend plug-in."""
    cause = " ".join(f"{error} {'' if error.__cause__ is None else f'({error.__cause__})'}".split())
    return UserError(
        f"train.device = {requested}: torch cannot be imported with its plug-ins ({cause}); for an Ascend "
        f"({PLUG_IN}), run `source set_env.sh` of Huawei's CANN first; for train.device=cpu or cuda, set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


def choose_device(
    requested: str, launch: Launch, environment: Mapping[str, str] = os.environ, threads: int | None = None
) -> torch.device:
    """Return this process's device, and set its number of CPU threads (None: `num_threads`).

    A scheduler may show each process only its own device (Slurm's `--gpus-per-task=1`, torchrun's
    `--virtual-local-rank`), which then has index 0. Raise `UserError` if the machine lacks the device type or has too
    few.
    """
    torch = load_torch(requested)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = requested if requested != "auto" else (accelerator.type if accelerator else "cpu")
    torch.set_num_threads(threads or num_threads(launch.local_world, environment))
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        fix = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        raise UserError(f"train.device = {requested}: this machine has no {kind} device; set train.device={fix}")
    count = torch.accelerator.device_count()
    shown_alone = count == 1 and any(name in environment for name in VISIBLE.get(kind, ()))
    if launch.local_world > count and not shown_alone:
        raise UserError(
            f"--nproc-per-node = {launch.local_world}: this machine has {count} {kind} device(s), and each process "
            f"needs its own; use at most --nproc-per-node={count}"
        )
    device = torch.device(kind, 0 if shown_alone else launch.local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


def number_on_node(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of a device among all devices of its node, from the visible-devices variable if it is set."""
    visible = next((environment[name] for name in VISIBLE.get(device.type, ()) if name in environment), "")
    numbers, index = [number.strip() for number in visible.split(",")], device.index or 0
    return numbers[index] if index < len(numbers) and numbers[index] else str(index)


def num_threads(local_world: int, environment: Mapping[str, str]) -> int:
    """Return this process's CPU threads: OMP_NUM_THREADS if the user set it, else a share of the usable cores.

    torchrun sets one thread per process whatever the number of cores, but initialization and host-side optimizer
    updates need more. Usable cores respect CPU affinity (`--numa-binding`) and the container's quota.
    """
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list: one per nested level
    if given.isdecimal() and int(given) and (given != "1" or _is_users_choice("OMP_NUM_THREADS", environment)):
        return int(given)
    allowed = len(os.sched_getaffinity(0))
    try:
        launcher_cores = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # the parent belongs to another user, or is gone
        launcher_cores = allowed
    cores = min(max(allowed, launcher_cores), cpu_quota())
    return max(1, min(allowed, math.floor(cores / local_world)))


def _is_users_choice(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether a variable was set before the launcher, which fills in the missing ones."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return True
    with suppress(OSError):  # the parent is gone or another user's, or there is no /proc
        return f"\0{name}=".encode() in b"\0" + Path("/proc", str(os.getppid()), "environ").read_bytes()
    return False


WATCH_SECONDS = 1.0
"""Polling interval of `end_with_launcher`, in seconds."""


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Exit without saving soon after the torchrun that started this process is gone, even if this process hangs."""
    # A torchrun killed by force cannot end its processes: they would hold devices and write where restarted ones do.
    if "TORCHELASTIC_RUN_ID" not in environment or any(thread.name == "launcher" for thread in enumerate_threads()):
        return
    launcher = os.getppid()

    def watch() -> None:
        # orphans are adopted by another parent process
        while os.getppid() == launcher:
            time.sleep(WATCH_SECONDS)
        try:
            name = f"rank {environment.get('RANK')} on {socket.gethostname()}"
            print(f"\n{name}: torchrun is gone (process {launcher}); exiting too", file=sys.stderr, flush=True)
        finally:
            os._exit(1)  # `sys.exit` would wait for the other threads

    Thread(target=watch, name="launcher", daemon=True).start()
