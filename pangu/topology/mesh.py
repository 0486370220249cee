"""Mesh: a layout with this process's rank, its device and the live process groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pangu.common.errors import LocalError, LostError, UserError, is_out_of_memory, shown
from pangu.topology import experts
from pangu.topology.backends import abort_groups, connect_groups, create_group, group_options, store_barrier
from pangu.topology.launch import VISIBLE, end_with_launcher, number_on_node
from pangu.topology.layout import GROUPS, Coordinates, Layout
from pangu.topology.recorder import AxisGroup, Recorder

BACKGROUND = "background"
"""Prefix of the keys of background threads in the store."""


def is_silence(error: RuntimeError) -> bool:
    """Return whether an error means that another process did not answer; gloo has no exception type for that."""
    return (isinstance(error, dist.DistError) or "/gloo/" in str(error)) and not is_out_of_memory(error)


def exchanges(device: torch.device) -> bool:
    """Return whether groups of this device exchange shards; see `AxisGroup.exchanges`."""
    # gloo's all-gather goes round a ring; its reduce-scatter reduces everything everywhere, in ring order.
    return device.type == "cpu"


@dataclass(frozen=True)
class Mesh:
    """Layout with live process groups, created once per process and passed to constructors: no global state."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Axis of `Layout.peers` -> this rank's group, for axes with several ranks; `world`: all ranks."""
    timeout_s: float = 600.0
    """Timeout of collectives and of the store, in seconds (`parallel.timeout_s`)."""
    store: dist.Store | None = None
    """Store in which the processes meet outside collectives; None: single process."""
    store_rank: int | None = None
    """Rank of the process that serves the store; None: the launcher does."""
    hosts: list[str] = field(default_factory=list)
    """Host names of all ranks, in order; empty until they are known, and in runs on one node."""
    recorder: Recorder = field(default_factory=Recorder)

    @classmethod
    def connect(cls, layout: Layout, device: torch.device, timeout_s: float = 600.0, attempt: int = 0) -> Mesh:
        """Join the other processes of the run and create the groups; `attempt` counts restarts by the launcher.

        Raise `LostError` if not all processes arrive within `timeout_s`, `LocalError` if two differ in layout or share
        a device, or the port is in use, `UserError` if the world size does not match.
        """
        end_with_launcher()
        if layout.world == 1:
            return cls(layout, 0, device, timeout_s=timeout_s)
        if not dist.is_initialized():
            _require_address(os.environ)
            backend = dist.get_default_backend_for_device(device)
            store, have_met = None, False
            try:
                store, rank, world = _open_store(timeout_s, attempt)
                # compare layouts before creating groups: two different ones would deadlock in that
                if (first := store.compare_set("layout", "", repr(layout)).decode()) != repr(layout):
                    raise LocalError(
                        f"rank {rank} on {socket.gethostname()} has {layout}, another rank has {first}: start all "
                        "nodes with the same command"
                    )
                require_own_device(store, rank, device)
                store_barrier(store, "world", world)
                have_met = True
                create = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=world)
                create_group(create, backend, world, timeout_s)
            except RuntimeError as error:
                raise _lost(layout.world, timeout_s, store, error, have_met) from error
        assert dist.group.WORLD is not None
        if dist.get_world_size() != layout.world:
            raise UserError(f"{layout} needs {layout.world} processes, got {dist.get_world_size()}")
        store_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        groups = {"world": dist.group.WORLD}
        store = dist.distributed_c10d._get_default_store()
        mesh = cls(layout, dist.get_rank(), device, groups, timeout_s, store, store_rank)
        try:
            for axis, ranks in mesh._axes():
                if len(set(ranks)) > 1:
                    # torch names a group by its ranks and by how many groups this process has: every process must
                    # create equally many, and those outside this one create a group of one rank
                    is_member = mesh.rank in ranks
                    group = mesh.new_group(ranks if is_member else [mesh.rank], axis)
                    if is_member:
                        mesh.groups[axis] = group
            if dist.get_backend() in ("nccl", "hccl"):
                connect_groups(mesh.groups, device)
        except RuntimeError as error:
            raise _lost(layout.world, timeout_s, store, error, have_met=True) from error
        return mesh

    @classmethod
    def without_layout(cls, world: int, timeout_s: float, attempt: int = 0) -> Mesh:
        """Return a mesh with a store but no groups, to agree on a layout; raise `LostError` after `timeout_s`."""
        try:
            store, rank, world = _open_store(timeout_s, attempt)
        except RuntimeError as error:
            raise _lost(world, timeout_s, None, error) from error
        return cls(Layout(data=world), rank, torch.device("cpu"), timeout_s=timeout_s, store=store)

    def _axes(self) -> Iterator[tuple[str, list[int]]]:
        yield from ((axis, self.layout.peers(self.rank, axis)) for axis in GROUPS)
        if self.layout.splits_experts:
            layout = experts.ExpertLayout(self.layout)
            yield from ((axis, layout.peers(self.rank, axis)) for axis in experts.GROUPS)

    def background(self, name: str = BACKGROUND) -> Mesh:
        """Return this mesh for a background thread: its own connection and prefix `name` in the store, no groups."""
        # no groups: collectives of two threads on one group would run in any order
        if self.store is None:
            return self
        return replace(self, groups={}, store=dist.PrefixStore(name, self.store.clone()))  # type: ignore[attr-defined]

    def new_group(self, ranks: Sequence[int], axis: str) -> dist.ProcessGroup:
        """Create a group of global ranks along an axis, or for `messages` or `host`, which are tensors on the host.

        All members call this in the same order. Raise RuntimeError (see `is_silence`) if they cannot connect.
        """
        backend = "gloo" if axis == "host" else dist.get_backend()
        options = group_options(axis, timedelta(seconds=self.timeout_s)) if backend == "nccl" else None
        # only members take part: by default every process of the run would have to call this for every group
        create = partial(dist.new_group, list(ranks), backend=backend, use_local_synchronization=True)
        if backend == "gloo" and self.store is not None:  # every process creates equally many
            store_barrier(self.store, f"group {len(dist.distributed_c10d._world.pg_names)} of {min(ranks)}", len(ranks))
        group: dist.ProcessGroup
        group = create_group(partial(create, pg_options=options), backend, len(ranks), self.timeout_s)
        return group

    @property
    def at(self) -> Coordinates:
        """Coordinates of this rank."""
        return self.layout.coordinates(self.rank)

    @property
    def replica(self) -> int:
        """Index of this rank among the replicas."""
        return self.layout.replica(self.at)

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Name of this rank in messages, with its host in multi-node runs."""
        return self.named([self.rank])

    def named(self, ranks: Sequence[int], most: int | None = None) -> str:
        """Return up to `most` ranks as text: `rank 3, 5`, or `rank 3 on node-a, 5 on node-b` in multi-node runs."""
        texts = [f"{rank} on {self.hosts[rank]}" if self.hosts else str(rank) for rank in ranks[:most]]
        return f"rank {', '.join(texts)}" + f" and {len(ranks) - len(texts)} more" * (len(ranks) > len(texts))

    def group(self, axis: str) -> AxisGroup | None:
        """Return the group along an axis, or None if this rank is alone on it."""
        group = self.groups.get(axis)
        return None if group is None else AxisGroup(group, axis, self.recorder, exchanges(self.device), self.device)

    def close(self, failed: bool = False) -> None:
        """Destroy the process groups, or abort NCCL's if this process has `failed`."""
        # torch waits in `destroy_process_group` for pending collectives of NCCL, to which a failed process never comes
        if failed and self.groups and dist.get_backend() == "nccl":
            abort_groups()
        elif self.groups:
            dist.destroy_process_group()


def _require_address(environment: Mapping[str, str]) -> None:
    port = environment.get("MASTER_PORT", "")
    if not environment.get("MASTER_ADDR") or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise LocalError(
            f"MASTER_ADDR = {shown(environment.get('MASTER_ADDR', ''))}, MASTER_PORT = {shown(port)}: must be the host "
            "and port (1 to 65535) of rank 0; start with torchrun, which sets both"
        )


def _open_store(timeout_s: float, attempt: int) -> tuple[dist.Store, int, int]:
    """Return the store in which the processes meet, and the rank and world size that the launcher gave."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    # torchrun's store survives restarts of the processes, and all runs of a sweep: give each its own prefix
    store = dist.PrefixStore(f"attempt-{attempt}-{store.add(f'runs-{attempt}-{rank}', 1)}", store)
    store.set(f"here-{rank}", "")
    return store, rank, world


def _lost(
    world: int, timeout_s: float, store: dist.Store | None, error: RuntimeError, have_met: bool = False
) -> LocalError:
    """Return the message that an error while processes meet means; raise the error again if it means something else."""
    if not is_silence(error):
        raise error
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error):
        return LocalError(f"{place} (MASTER_ADDR, MASTER_PORT): is in use; set another MASTER_PORT for all ranks")
    name, reason = f"rank {os.environ.get('RANK')} on {socket.gethostname()}", str(error).splitlines()[0]
    if have_met:
        fix = "check the firewall between their nodes and GLOO_SOCKET_IFNAME, unless one of them ended"
        return LostError(f"{name}: all {world} processes of this run met, but could not connect; {fix} ({reason})")
    return LostError(
        f"{name}: not all {world} processes of this run connected to {place} within {timeout_s:g} s "
        f"(parallel.timeout_s){_missing_ranks(store, world)}; check the output of the missing ones, then that "
        f"address and the firewall ({reason})"
    )


def _missing_ranks(store: dist.Store | None, world: int) -> str:
    """Return a phrase with the first ranks that have not reached the launcher's store, or ""."""
    if store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    try:
        ranks = [rank for rank in range(world) if not store.check([f"here-{rank}"])]
    except RuntimeError:  # the launcher is gone too
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f", rank {', '.join(map(str, ranks[:8]))}{more} missing" if ranks else ""


def require_own_device(store: dist.Store, rank: int, device: torch.device) -> None:
    """Raise `LocalError` if two ranks share a device, which backends report less plainly, before groups are made."""
    if device.type == "cpu":
        return
    uuid = str(getattr(torch.get_device_module(device).get_device_properties(device), "uuid", ""))
    # torch_npu has no UUID before 2.13, and later reports zeros if the driver does not provide one
    number = uuid if uuid.strip("0-") else f"{device.type} {number_on_node(device)}"
    name = f"{socket.gethostname()}, {number}"
    if (holder := store.compare_set(f"device-{name}", "", str(rank)).decode()) != str(rank):
        by = "".join(f" ({variable})" for variable in VISIBLE.get(device.type, ())[:1])
        raise LocalError(
            f"rank {holder} and rank {rank} share one device ({name}), and each process needs its own; start fewer "
            f"(--nproc-per-node), or make another device visible to each{by}"
        )
