"""Processes that do not meet say so."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from pangu.config.errors import LocalError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_peer_never_comes_ends_with_one_message(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LocalError, match=rf"rank {rank}: the 2 processes .* 127.0.0.1:{port} within 1 s") as raised:
        Mesh.connect(Layout(2), torch.device("cpu"), timeout_s=1.0)
    assert len(str(raised.value).splitlines()) == 1


def test_a_process_with_another_layout_ends_before_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two nodes are started with different commands."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("attempt-0/layout", repr(Layout(data=2)))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **named: None)
    with pytest.raises(LocalError, match=r"rank 1 has Layout\(tensor=2.* another one Layout\(tensor=1, .*data=2"):
        Mesh.connect(Layout(tensor=2), torch.device("cpu"), timeout_s=5.0)
