"""A mesh: a layout with this process's rank, its device and the live process groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pangu.config.errors import LocalError, LostError, UserError, shown
from pangu.topology.layout import GROUPS, Coordinates, Layout
from pangu.topology.recorder import AxisGroup, Recorder


def is_silence(error: RuntimeError) -> bool:
    """True if another process did not answer. gloo has no exception type for that."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


@dataclass(frozen=True)
class Algorithms:
    """How two collectives are carried out: `own`, by the backend; `exchange`, every rank sends its shard to each and
    adds up what it receives in the order of the ranks."""

    gather: str = "exchange"
    scatter: str = "exchange"


@dataclass(frozen=True)
class Mesh:
    """Made once per process and passed to constructors; there is no global state beside it."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Axis of `Layout.peers` -> the group of this rank along it, if there are several ranks; `world`: all ranks."""
    timeout_s: float = 600.0
    store: dist.Store | None = None
    """Where the processes met, and still do outside collectives; None: there is only one."""
    keeper: int | None = None
    """Rank of the process that serves the store; None: the launcher does."""
    algorithms: Algorithms = field(default_factory=Algorithms)
    hosts: list[str] = field(default_factory=list)
    """Of all ranks, in order; empty until they are known, and in a run of one node."""
    recorder: Recorder = field(default_factory=Recorder)
    """Of this rank's steps."""

    @classmethod
    def connect(cls, layout: Layout, device: torch.device, timeout_s: float = 600.0, attempt: int = 0) -> Mesh:
        """Join the other processes of the run; one device needs no process group. `attempt`: restarts by the launcher.
        Raises LostError if not all processes arrive within `timeout_s`, LocalError if another one has another layout or
        the same device, UserError if there are not as many processes."""
        from pangu.topology.orphan import end_with_launcher, missing_ranks

        end_with_launcher()
        if layout.world == 1:
            return cls(layout, 0, device, timeout_s=timeout_s)
        if not dist.is_initialized():
            _require_address(os.environ)
            backend = dist.get_default_backend_for_device(device)
            store = None
            try:
                store, rank, world = _open_store(timeout_s, attempt)
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
                # before groups are made, in which processes of two layouts would wait for each other
                if (first := store.compare_set("layout", "", repr(layout)).decode()) != repr(layout):
                    raise LocalError(
                        f"rank {rank} on {socket.gethostname()} has {layout}, another one {first}: all nodes need the "
                        "same command"
                    )
                require_own_device(store, rank, device)
            except RuntimeError as error:
                if not is_silence(error):
                    raise
                raise _lost(layout.world, timeout_s, missing_ranks(store, layout.world), error) from error
        assert dist.group.WORLD is not None
        if dist.get_world_size() != layout.world:
            raise UserError(f"{layout} is of {layout.world} processes, and there are {dist.get_world_size()}")
        keeper = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        algorithms = Algorithms() if device.type == "cpu" else Algorithms("own", "own")
        groups = {"world": dist.group.WORLD}
        store = dist.distributed_c10d._get_default_store()
        mesh = cls(layout, dist.get_rank(), device, groups, timeout_s, store, keeper, algorithms)
        for axis, ranks in mesh._axes():
            if len(set(ranks)) > 1:
                # torch names a group by its ranks and by how many groups this process has: every process must make as
                # many, those that are not in this one a group of one rank
                is_member = mesh.rank in ranks
                group = mesh.new_group(ranks if is_member else [mesh.rank], axis)
                if is_member:
                    mesh.groups[axis] = group
        if dist.get_backend() in ("nccl", "hccl"):
            from pangu.topology.backends import connect_groups

            connect_groups(mesh.groups, device)
        return mesh

    @classmethod
    def without_layout(cls, world: int, timeout_s: float, attempt: int = 0) -> Mesh:
        """Return a mesh of all processes of the run that has a store and no groups, to agree on a layout. Raises
        LostError if the process that serves the store does not arrive within `timeout_s`."""
        try:
            store, rank, world = _open_store(timeout_s, attempt)
        except RuntimeError as error:
            if not is_silence(error):
                raise
            raise _lost(world, timeout_s, "", error) from error
        return cls(Layout(data=world), rank, torch.device("cpu"), timeout_s=timeout_s, store=store)

    def _axes(self) -> Iterator[tuple[str, list[int]]]:
        """Axes, and the ranks along each."""
        yield from ((axis, self.layout.peers(self.rank, axis)) for axis in GROUPS)
        if self.layout.splits_experts:
            from pangu.topology import experts

            layout = experts.ExpertLayout(self.layout)
            yield from ((axis, layout.peers(self.rank, axis)) for axis in experts.GROUPS)

    def background(self) -> Mesh:
        """The same mesh for a thread beside training. It has no groups, since collectives of two threads on one group
        would meet in any order, and a connection of its own to the store, in which it meets the others' threads."""
        if self.store is None:
            return self
        return replace(self, groups={}, store=dist.PrefixStore("background", self.store.clone()))  # type: ignore[attr-defined]

    def new_group(self, ranks: Sequence[int], axis: str) -> dist.ProcessGroup:
        """A further group of global ranks, along an axis of theirs or for `messages` between stages; all of them must
        create it, in the same order as their other groups."""
        timeout, options = timedelta(seconds=self.timeout_s), None
        if dist.get_backend() == "nccl":
            from pangu.topology.backends import group_options

            options = group_options(axis, timeout)
        # only the members meet: with the default every process of the run would have to take part in making each group
        group = dist.new_group(list(ranks), timeout=timeout, pg_options=options, use_local_synchronization=True)
        assert group is not None
        return group

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def replica(self) -> int:
        return self.layout.replica(self.at)

    @property
    def is_first(self) -> bool:
        """True on the one process that prints and writes for all."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """This rank in messages."""
        return self.named([self.rank])

    def named(self, ranks: Iterable[int]) -> str:
        """Ranks in words: `rank 3, 5`, or `rank 3 on node-a, 5 on node-b` in a run of several nodes."""
        return f"rank {', '.join(f'{rank} on {self.hosts[rank]}' if self.hosts else str(rank) for rank in ranks)}"

    def group(self, axis: str) -> AxisGroup | None:
        group = self.groups.get(axis)
        return None if group is None else AxisGroup(group, axis, self.recorder)

    def close(self) -> None:
        if self.groups:
            dist.destroy_process_group()


def _require_address(environment: Mapping[str, str]) -> None:
    """Raise LocalError unless the launcher's variables say where the processes meet."""
    port = environment.get("MASTER_PORT", "")
    if not environment.get("MASTER_ADDR") or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise LocalError(
            f"MASTER_ADDR = {shown(environment.get('MASTER_ADDR', ''))}, MASTER_PORT = {shown(port)}: must be the host "
            "and the port (1 to 65535) where the processes meet, which torchrun sets"
        )


def _open_store(timeout_s: float, attempt: int) -> tuple[dist.Store, int, int]:
    """Return the store in which the processes meet, and the rank and number of processes that the launcher gave."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    # torchrun's store outlives the processes that it starts again, and each run of a sweep
    store = dist.PrefixStore(f"attempt-{attempt}-{store.add(f'runs-{attempt}-{rank}', 1)}", store)
    store.set(f"here-{rank}", "")
    return store, rank, world


def _lost(world: int, timeout_s: float, missing: str, error: RuntimeError) -> LostError:
    """Return the error of a process that the others did not come to. `missing`: which, as far as that is known."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return LostError(
        f"rank {os.environ.get('RANK')} on {socket.gethostname()}: the {world} processes of this run did not all come "
        f"to {place} within {timeout_s:g} s (parallel.timeout_s){missing}; a process that could not start says why "
        f"itself, otherwise look at that address and the firewall ({str(error).splitlines()[0]})"
    )


def require_own_device(store: dist.Store, rank: int, device: torch.device) -> None:
    """Before groups are made: a backend says it less plainly that two ranks have one device. Raises LocalError."""
    if device.type == "cpu":
        return
    from pangu.topology.accelerator import number_on_node
    from pangu.topology.launch import VISIBLE

    uuid = str(getattr(torch.get_device_module(device).get_device_properties(device), "uuid", ""))
    # torch_npu has none before 2.13, and later one of zeros where the driver does not tell
    number = uuid if uuid.strip("0-") else f"{device.type} {number_on_node(device)}"
    name = f"{socket.gethostname()}, {number}"
    if (holder := store.compare_set(f"device-{name}", "", str(rank)).decode()) != str(rank):
        by = "".join(f" ({variable})" for variable in VISIBLE.get(device.type, ())[:1])
        raise LocalError(
            f"rank {holder} and rank {rank} have one device ({name}): each process needs its own; start fewer "
            f"(--nproc-per-node), or show each process another one{by}"
        )
