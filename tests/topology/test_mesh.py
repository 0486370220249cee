"""Processes that do not meet say so."""

from __future__ import annotations

import socket

import pytest
import torch

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
