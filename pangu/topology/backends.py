"""Settings of the collective backends NCCL and HCCL: stream priorities, CTAs, the flight recorder."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pangu.topology.experts import GROUPS as EXPERT_GROUPS
from pangu.topology.launch import ALLOCATOR, CONNECTIONS, GROWING, MEMBER

# Not measured yet: only several accelerators can show what stream priorities and CTA limits are worth. NCCL_MAX_CTAS,
# if the user sets it, replaces the limits.
URGENT = ("tensor", "messages")
"""Axes on the critical path, waited for right after the launch: their kernels run on high-priority streams."""
MESSAGE_CTAS = 4
"""Maximum CTAs of an NCCL message between pipeline stages, which leaves the other SMs to computation."""
SHARDED = ("replicas", "shard", "gather", "copies")
OVERLAPPED = (*SHARDED, *(f"expert_{axis}" for axis in SHARDED))
"""Axes of gathered weights and reduced gradients, which are communicated during matmuls."""
OVERLAPPED_CTAS = 16
"""Maximum CTAs of an NCCL collective along `OVERLAPPED`: an eighth of an H100's SMs."""
WARMED = ("world", "tensor", "context", "replicas", "shard", "gather", "copies", *EXPERT_GROUPS)
"""Groups to connect at startup, because every run that has them uses them in each step."""
SHOWN = ("CUDA_DEVICE_MAX_", "NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "HCCL_", *ALLOCATOR)
"""Prefixes of the environment variables that are logged at startup."""
CONNECT_SECONDS = 8.0
"""Timeout of connecting members that have all arrived; gloo waits five times as long for one that connects to it."""
RECORDED_COLLECTIVES = 2000
"""Capacity of each process's flight recorder: the collectives of a few steps, a few hundred KiB."""


def backend_of(device: torch.device) -> str:
    """Return the collective backend of a device type: gloo, nccl, or the one its plug-in registers (hccl for `npu`)."""
    return dist.get_default_backend_for_device(device)


def group_options(axis: str, timeout: timedelta) -> Any:
    """Return the NCCL options of a group along an axis of `Layout.peers`, or of a `messages` group between stages."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=axis in URGENT)
    options._timeout = timeout  # torch warns if this differs from the timeout passed to `new_group`
    if axis == "messages" or axis in OVERLAPPED:
        options.config.max_ctas = MESSAGE_CTAS if axis == "messages" else OVERLAPPED_CTAS
    return options


def connect_groups(groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> None:
    """Connect the groups now, in the same order on every rank, instead of lazily inside the first step."""
    for axis in WARMED:
        if axis in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=groups[axis])


def store_barrier(store: dist.Store, name: str, count: int) -> None:
    """Wait for `count` ranks to come here; fail at once if the store is closed, as a launcher with spares does."""
    if store.add(f"{name} arrived", 1) == count:
        store.set(name, "")
    store.wait([name])


_tracked = set[tuple[int, int]]()
"""Device and inode of the sockets of this process's groups."""


def create_group(create: Callable[..., Any], backend: str, ranks: int, timeout_s: float) -> Any:
    """Return what `create` makes: a group of `ranks` ranks that have all arrived, whose collectives have a timeout.

    The timeout of gloo also limits how long a rank waits to be connected by one that is lost meanwhile. Where lost
    ranks are replaced, it is short while the group connects; elsewhere that would only end runs with slow ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    connecting = timedelta(seconds=CONNECT_SECONDS + ranks / 50) if MEMBER in os.environ else timeout
    if backend != "gloo":
        return create(timeout=timeout)
    before = _sockets().keys()
    group = create(timeout=min(timeout, connecting))
    _tracked.update(_sockets().keys() - before)
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    if MEMBER in os.environ:
        _keep(group or dist.distributed_c10d._get_default_group(), timeout_s)
    return group


_kept: list[tuple[dist.ProcessGroup, float]] = []
"""gloo groups that are in use, each with its timeout."""
_left: list[tuple[dist.ProcessGroup, float]] = []
"""gloo groups that are no longer in use, each with the time at which its last message has timed out."""


def _keep(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Let a gloo group outlive the messages that a lost rank leaves unfinished: its end would wait for them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # `_kept` alone ends with Python, which would wait as well
    _kept.append((group, timeout_s))


def leave_groups() -> None:
    """Note that the gloo groups are no longer in use, and end those left before whose messages have timed out."""
    now = time.monotonic()
    for group, _ in (ended := [left for left in _left if left[1] < now]):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
    _left[:] = [left for left in _left if left not in ended] + [(group, now + limit) for group, limit in _kept]
    _kept.clear()


def _shut_down_connections() -> None:
    """Shut down the gloo connections of all groups: whoever waits in a collective fails, at both ends."""
    # gloo itself closes those of a group that nothing refers to
    for identity, number in _sockets().items():
        if identity in _tracked:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # gloo aborts the process if a socket that listens is shut down
                connection.shutdown(socket.SHUT_RDWR)
    _tracked.clear()


def _sockets() -> dict[tuple[int, int], int]:
    """Return the sockets of this process, each with its number."""
    found = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the listing itself is closed by now
            status = os.fstat(int(path.name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_dev, status.st_ino] = int(path.name)
    return found


def abort_groups() -> None:
    """Abort the communicators of this process: a thread that waits in a collective fails at once.

    Without that NCCL waits for a peer that is gone until a timeout, and gloo for one that is still there.
    """
    _shut_down_connections()
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    names = dict(dist.distributed_c10d._world.pg_names)
    nccl: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    nccl._group_start()  # aborts one after another could wait for each other
    for group in sorted(names, key=lambda group: names[group], reverse=True):
        group.abort()
    nccl._group_end()


@contextmanager
def record_collectives(folder: Path, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let NCCL record recent collectives and dump them to `folder`/collectives-RANK when one times out."""
    # Wrap the creation of the process groups. torch's flight-recorder tools read the files. A variable that the user
    # has set is kept, also under its older name: torch prefers the newer one if both are set.
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
        for name in missing:  # the next run of a sweep, in this process, uses another folder
            environment.pop(name, None)


def describe_environment(given: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the allocator and backend variables as text: defaults of pangu, and those the user has `given`."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"{name}={environment[name]}" for name in sorted(names))

    variables = {name for name in environment if name.startswith(SHOWN)}
    defaults = {name for name in variables if given.get(name) in (None, GROWING, CONNECTIONS.get(name))}
    parts = (("default", defaults), ("yours", variables - defaults))
    return "; ".join(f"{whose}: {listed(names)}" for whose, names in parts if names) or "nothing is set"
