"""Checks of a cluster before a run takes memory: limits, unequal nodes, folders that are not shared."""

from __future__ import annotations

import hashlib
import logging
import resource
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import pangu
from pangu.collectives.agreement import agree, agree_on_first, answer_all
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import LocalError, UserError, writing
from pangu.config.schema import RunConfig
from pangu.metrics.devices import device_name
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

FILES_OF_ITS_OWN = 512
"""Open files of a process besides its connections: libraries, data, checkpoints, pipes of its workers."""
CONNECTIONS_PER_PEER = 4
"""Upper bound of groups that two ranks share; gloo connects each pair of a group once."""
SHARED_WITHIN_SECONDS = 10.0
"""Delay until a network file system shows a new file."""


@dataclass(frozen=True)
class Node:
    """Facts about the node of a rank that the ranks compare."""

    host: str
    device: str
    versions: str
    configuration: str
    """Digest of all keys but paths, which may differ between nodes."""

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> Node:
        """Return the facts about this process."""
        values = asdict(replace(config, cluster=None, train=replace(config.train, output="")))
        for path in ("folder", "train", "validation", "tokenizer"):
            values["data"].pop(path, None)
        digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        versions = f"pangu {pangu.__version__}, torch {torch.__version__}"
        return cls(socket.gethostname(), device_name(device), versions, digest)


def raise_open_files(num_ranks: int) -> None:
    """Allow this process the files and connections that `num_ranks` ranks need. Raises LocalError if it cannot."""
    needed = FILES_OF_ITS_OWN + CONNECTIONS_PER_PEER * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard < needed and hard != resource.RLIM_INFINITY:
        raise LocalError(
            f"open files on {socket.gethostname()}: at most {hard} are allowed, {num_ranks} processes need about "
            f"{needed}; run `ulimit -Hn {needed}` before the launcher, or set LimitNOFILE of its service or "
            "--ulimit of its container"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_cluster(config: RunConfig, mesh: Mesh) -> None:
    """Compare the nodes of a run, and note the hosts of the ranks; what only slows the run down is a warning.

    Raises UserError on every rank if versions or configurations differ, or if the run folder is not shared by all.
    """
    nodes = gather_objects(Node.of(config, mesh.device), mesh.group("world"))
    require_equal(nodes)
    hosts = [node.host for node in nodes]
    mesh.hosts[:] = hosts if len(set(hosts)) > 1 else []
    for line in warnings(nodes, mesh.layout):
        log.warning(line)
    require_shared(Path(config.train.output), mesh, hosts)


def require_equal(nodes: Sequence[Node]) -> None:
    """Raise UserError if ranks (`nodes` in rank order) run other versions or another configuration than rank 0."""
    first = nodes[0]
    for rank, node in enumerate(nodes):
        if node.versions != first.versions:
            raise UserError(
                f"rank {rank} on {node.host} has {node.versions}, rank 0 on {first.host} has {first.versions}: "
                "install the same versions on all nodes"
            )
        if node.configuration != first.configuration:
            raise UserError(
                f"rank {rank} on {node.host} was started with a different configuration than rank 0 on {first.host}: "
                "use the same command and configs/ on all nodes (paths of data and train.output may differ)"
            )


def warnings(nodes: Sequence[Node], layout: Layout) -> list[str]:
    """Return warnings about unequal devices and tensor-parallel groups across nodes. `nodes`: in rank order."""
    lines = []
    hosts_of: dict[str, str] = {}
    for node in nodes:
        hosts_of.setdefault(node.device, node.host)
    if len(hosts_of) > 1:
        kinds = ", ".join(f"{device} (on {host})" for device, host in hosts_of.items())
        lines.append(f"devices differ: {kinds}; every step waits for the slowest, so exclude slow ones")
    for rank in range(0, layout.world, layout.tensor):
        hosts = {nodes[peer].host for peer in layout.peers(rank, "tensor")}
        if len(hosts) > 1:
            fits = min(sum(node.host == host for node in nodes) for host in hosts)
            lines.append(
                f"parallel.tensor = {layout.tensor}: the group of rank {rank} spans {len(hosts)} nodes "
                f"({', '.join(sorted(hosts))}), so that several messages per layer cross the network; "
                f"use a parallel.tensor of at most {fits}"
            )
            break
    return lines


def require_shared(output: Path, mesh: Mesh, hosts: Sequence[str]) -> None:
    """Raise UserError on every rank if a host does not see what rank 0 writes into the run folder."""
    if len(set(hosts)) == 1:
        return
    name = gather_objects(f".shared-{secrets.token_hex(8)}", mesh.group("world"))[0]

    def make() -> None:
        with writing(output):
            (output / name).touch()

    agree_on_first(mesh, make)
    try:
        first_of_host = hosts.index(hosts[mesh.rank]) == mesh.rank
        seen = agree(mesh, lambda: _appears(output / name), runs_here=first_of_host)
    finally:
        if mesh.is_first:
            (output / name).unlink(missing_ok=True)
    blind = sorted({host for host, sees in zip(hosts, seen, strict=True) if sees is False})
    if blind:
        raise UserError(
            f"train.output = {output}: {', '.join(blind)} does not see the files of {hosts[0]}, so a checkpoint "
            "would be scattered over nodes; use a folder on a file system that all nodes mount"
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SHARED_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def require_same_text(mesh: Mesh, position: Mapping[str, Any]) -> None:
    """Raise UserError on all ranks unless all stream the same text; `position`: of the stream at its start."""
    different = answer_all(mesh, position, lambda places: [i for i, one in enumerate(places) if one != places[0]])
    if different:
        raise UserError(
            f"data.train: rank {', '.join(map(str, different[:8]))} has different file names or sizes than rank 0, or"
            " a different tokenizer; make them the same on all nodes"
        )
