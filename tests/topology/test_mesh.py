"""Processes that do not meet say so."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pangu.collectives.reduce import all_reduce
from pangu.common.errors import LocalError, LostError
from pangu.topology import backends
from pangu.topology import mesh as mesh_module
from pangu.topology.backends import describe_environment, record_collectives
from pangu.topology.launch import CONNECTIONS, GROWING, MEMBER
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh, is_silence, require_own_device
from pangu.topology.recorder import AxisGroup
from pangu.zero import gradients
from tests.pace import at_some_pace
from tests.parallel.harness import small_trainer
from tests.spawn import Pool, free_port


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_peer_never_comes_ends_with_one_message(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        LocalError, match=rf"rank {rank} on \S+: not all 2 processes .* 127.0.0.1:{port} within 1 s"
    ) as raised:
        Mesh.connect(Layout(2), torch.device("cpu"), timeout_s=1.0)
    assert len(str(raised.value).splitlines()) == 1


def test_a_port_in_use_without_a_launcher_is_no_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LocalError, match=r"is in use; set another MASTER_PORT for all ranks$") as raised:
            Mesh.connect(Layout(2), torch.device("cpu"), timeout_s=1.0)
    assert not isinstance(raised.value, LostError)


def test_processes_that_met_but_cannot_connect_are_not_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a firewall lets only MASTER_PORT through. Members of a run with spares give up before the timeout."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    server.add("attempt-0-1/world arrived", 1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True", MEMBER: "1@127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(backends, "CONNECT_SECONDS", 0.1)
    with pytest.raises(LostError, match=r"rank 1 on \S+: all 2 processes of this run met, but could not connect;"):
        Mesh.connect(Layout(data=2), torch.device("cpu"), timeout_s=77.0)


@pytest.mark.parametrize("are_made", [False, True])
def test_groups_whose_members_do_not_come_are_one_message(are_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise dist.DistBackendError("nobody answers")

    monkeypatch.setattr(Mesh, "new_group", (lambda *_: None) if are_made else fail)
    monkeypatch.setattr(mesh_module, "connect_groups", fail)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with pytest.raises(LostError, match=r"all 2 processes of this run met, but could not connect;"):
            Mesh.connect(Layout(data=2), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@at_some_pace
def test_those_who_did_not_come_are_named(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """As where a process hangs while it loads libraries."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for rank in (0, 1, 3):
        server.set(f"attempt-0-1/here-{rank}", "")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "1", "WORLD_SIZE": "4"}
    for name, value in (place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LocalError, match=rf"within {pace:g} s \(parallel.timeout_s\), rank 2 missing; check the"):
        Mesh.connect(Layout(data=4), torch.device("cpu"), timeout_s=pace)


def test_a_collective_without_memory_is_not_taken_for_a_lost_peer() -> None:
    assert is_silence(dist.DistBackendError("watchdog caught collective operation timeout"))
    assert not is_silence(dist.DistBackendError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"))


def test_a_process_with_another_layout_ends_before_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two nodes are started with different commands."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("attempt-0-1/layout", repr(Layout(data=2)))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **named: None)
    with pytest.raises(LocalError, match=r"rank 1 on \S+ has Layout\(tensor=2.* another rank has Layout\(tensor=1"):
        Mesh.connect(Layout(tensor=2), torch.device("cpu"), timeout_s=300.0)


class _Options(SimpleNamespace):
    """As NCCL's, which this build of torch may lack."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(max_ctas=None))


Nccl = tuple[dict[tuple[int, ...], Any], list[object]]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """Replaced is NCCL: the groups of rank 0 of 16 by their ranks, with their options; and those it sends in."""
    made: dict[tuple[int, ...], Any] = {}
    sent: list[object] = []

    def new_group(
        ranks: list[int], timeout: object, backend: None, pg_options: Any, use_local_synchronization: bool
    ) -> object:
        made[tuple(ranks)] = pg_options
        return tuple(ranks)

    calls = {"new_group": new_group, "get_backend": lambda: "nccl", "get_rank": lambda: 0}
    calls |= {
        "get_world_size": lambda: 16,
        "is_initialized": lambda: True,
        "all_reduce": lambda tensor, group: sent.append(group),
    }
    for name, call in calls.items():
        monkeypatch.setattr(dist, name, call)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(Options=_Options), raising=False)
    monkeypatch.setattr(dist, "group", Mock(WORLD="world"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    return made, sent


def test_what_nccl_is_told_about_groups_and_which_it_connects_at_once(nccl: Nccl) -> None:
    made, sent = nccl
    mesh = Mesh.connect(Layout(tensor=2, pipeline=2, data=4, zero=1, zero_group=2), torch.device("cpu"))
    tensor, replicas, shards, copies, stages = (0, 1), (0, 2, 4, 6), (0, 2), (0, 4), (0, 8)
    assert sent == ["world", tensor, replicas, shards, shards, copies]  # stages send in theirs where they share weights
    assert {ranks for ranks, options in made.items() if options.is_high_priority_stream} == {tensor}
    limits = {ranks: options.config.max_ctas for ranks, options in made.items()}
    # weights and gradients are sent beside matmuls; layers wait for the sums of tensor-parallel ranks
    assert limits == {tensor: None, stages: None, **dict.fromkeys((replicas, shards, copies), 16)}
    mesh.new_group(stages, "messages")
    assert made[stages].is_high_priority_stream
    assert made[stages].config.max_ctas == 4
    assert {options._timeout.total_seconds() for options in made.values()} == {600.0}


def test_the_groups_of_experts_connect_at_once_too(nccl: Nccl) -> None:
    _, sent = nccl
    Mesh.connect(Layout(data=16, expert=4, zero=1, zero_group=8), torch.device("cpu"))
    every, shards, copies = tuple(range(16)), tuple(range(8)), (0, 8)
    dense = ["world", every, shards, shards, copies]
    assert sent == [*dense, (0, 1, 2, 3), (0, 4, 8, 12), (0, 4), (0, 4), (0, 8)]


def test_a_process_that_failed_aborts_nccls_groups_together_instead_of_waiting_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replaced is NCCL. One that ends well waits, as its collectives do."""
    done: list[str] = []
    groups = [Mock(**{"abort.side_effect": partial(done.append, f"abort {number}")}) for number in range(3)]
    names = Mock(pg_names={group: str(number) for number, group in enumerate(groups)})
    backend = Mock(_group_start=lambda: done.append("start"), _group_end=lambda: done.append("end"))
    monkeypatch.setattr(dist.distributed_c10d, "_world", names)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: Mock(_get_backend=lambda device: backend))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    mesh = Mesh(Layout(data=2), 0, torch.device("cpu"), groups={"world": Mock()})
    mesh.close()
    assert done == ["destroy"]
    mesh.close(failed=True)
    assert done[1:] == ["start", "abort 2", "abort 1", "abort 0", "end"]
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    mesh.close(failed=True)
    assert done[6:] == ["destroy"]


def _sends_before_the_first_step(rank: int, world: int, *overrides: str) -> list[str]:
    sent: list[str] = []

    def noted(tensor: torch.Tensor, group: AxisGroup) -> torch.Tensor:
        sent.append(group.axis)
        return all_reduce(tensor, group)

    with patch.object(gradients, "all_reduce", noted):
        small_trainer(Layout(pipeline=world), *overrides)
    return sent


def test_what_stages_share_connects_its_groups_before_the_first_step(pool: Pool) -> None:
    """In the same order on all of them; what shares nothing sends nothing."""
    relative = ("model.kind=gpt", "model.positions=relative")
    ends = ["ends", "pipeline"]
    assert pool.run(3, _sends_before_the_first_step, *relative) == [ends, ends[1:], ends]
    assert pool.run(2, _sends_before_the_first_step, "model.tied_head=false") == [[], []]


def test_what_nccl_remembers_of_collectives_and_where_it_is_written(tmp_path: Path) -> None:
    """That a user's own choice stays, under the older name of a variable too, which torch looks at only where the newer
    one is missing; and that a sweep's next run, in the same process, has a folder of its own."""
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    for run in ("first", "second"):
        with record_collectives(tmp_path / run, environment):
            size, temporary = (
                next(environment[name] for name in names if name in environment)
                for names in (
                    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
                    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
                )
            )
            assert size == "0"
            assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
            assert temporary == f"{tmp_path / run}/collectives-"
    assert environment == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    with record_collectives(tmp_path, environment := {}):
        # torch warns of older names
        assert sorted(environment) == ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"]


def test_the_start_says_what_the_allocator_and_nccl_are_told_and_by_whom(tmp_path: Path) -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "PYTORCH_ALLOC_CONF": GROWING, "HOME": "/root", **CONNECTIONS}
    with record_collectives(tmp_path, environment := dict(given)):
        default, yours = describe_environment(given, environment).split("; ")
    assert yours == "yours: NCCL_SOCKET_IFNAME=eth0"
    assert default.startswith(
        "default: CUDA_DEVICE_MAX_CONNECTIONS=32, PYTORCH_ALLOC_CONF=expandable_segments:True, TORCH_FR_BUFFER_SIZE"
    )
    assert "HOME" not in default
    assert describe_environment({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "INFO"}) == "yours: NCCL_DEBUG=INFO"


def test_two_ranks_on_one_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced are the devices: as many as there are, each process sees one, which is its first."""
    store, uuids = dist.HashStore(), ["GPU-a", "GPU-b", "GPU-a"]
    for rank, uuid in enumerate(uuids):
        module = Mock(get_device_properties=lambda device, uuid=uuid: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        if rank < 2:
            require_own_device(store, rank, torch.device("cuda", 0))
    with pytest.raises(
        LocalError, match=r"rank 0 and rank 2 share one device \(\S+, GPU-a\), and each process needs its own"
    ):
        require_own_device(store, 2, torch.device("cuda", 0))
    for rank, uuid in ((5, None), (6, "00000000-0000-0000-0000-000000000000")):  # as torch_npu has it
        properties = SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid)
        module = Mock(get_device_properties=lambda device, properties=properties: properties)
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
        require_own_device(store, rank, torch.device("cuda", 0))
    with pytest.raises(LocalError, match=r"rank 6 and rank 7 share one device \(\S+, cuda 6\)"):
        require_own_device(store, 7, torch.device("cuda", 0))
    require_own_device(store, 3, torch.device("cpu"))
    require_own_device(store, 4, torch.device("cpu"))


def test_ranks_are_named_with_their_nodes_where_there_are_several() -> None:
    mesh = Mesh(Layout(data=3), 2, torch.device("cpu"))
    assert (mesh.name, mesh.named([0, 1])) == ("rank 2", "rank 0, 1")
    mesh.hosts[:] = "aab"
    assert (mesh.name, mesh.background().named([0, 2])) == ("rank 2 on b", "rank 0 on a, 2 on b")


def test_a_rank_waits_only_shortly_to_be_connected_by_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, the one with the larger address connects: the lost one has told the address with the last port."""
    store = dist.HashStore()
    monkeypatch.setattr(backends, "CONNECT_SECONDS", 0.1)
    monkeypatch.setenv(MEMBER, "0@127.0.0.1:1")

    def tell_address() -> None:
        told = store.get("0/0")
        place = told.index(socket.inet_aton("127.0.0.1")) - 2
        store.set("0/1", told[:place] + b"\xff\xff" + told[place + 2 :])

    with ThreadPoolExecutor() as pool:
        pool.submit(tell_address)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Connect timeout") as failed:
            backends.create_group(partial(dist.ProcessGroupGloo, store, 0, 2), "gloo", 2, 9.0)
    assert is_silence(failed.value)
    assert time.monotonic() - began < 30, "gloo waits five times as long as it is told"


@patch.dict(os.environ, {MEMBER: "0@127.0.0.1:1"})
def _comes_late(rank: int, world: int, pace: float) -> float:
    backends.CONNECT_SECONDS = 0.4 * pace
    mesh = Mesh.connect(Layout(data=world), torch.device("cpu"), timeout_s=77.0)
    time.sleep(2.5 * pace * rank)
    group: Any = mesh.new_group(range(world), "host")
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


@at_some_pace
def test_time_to_connect_begins_when_all_ranks_have_arrived_and_is_not_that_of_collectives(
    pool: Pool, pace: float
) -> None:
    assert pool.run(2, _comes_late, pace) == [77.0, 77.0]
