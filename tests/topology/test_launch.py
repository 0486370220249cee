"""What the launcher says."""

from __future__ import annotations

import os

import pytest
import torch

from pangu.config.errors import UserError
from pangu.topology.launch import Launch, choose_device


def test_without_a_launcher_there_is_one_process() -> None:
    assert Launch.from_environment({}) == Launch(0, 1, 0, 1)


def test_torchruns_variables() -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Launch.from_environment(values) == Launch(5, 8, 1, 4)
    again = {**values, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert Launch.from_environment({**again, "TORCHELASTIC_USE_AGENT_STORE": "True"}).attempt == 3
    assert Launch.from_environment({**again, "TORCHELASTIC_USE_AGENT_STORE": "False"}).attempt == 0


def test_an_absent_accelerator_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(
        UserError, match=r"train\.device = cuda: this machine has no cuda device; train\.device=cpu works"
    ):
        choose_device("cuda", Launch())
    assert choose_device("auto", Launch()).type == "cpu"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_processes_share_the_cores_of_their_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun leaves each one core; beside an accelerator as well, the host updates what is offloaded."""
    for name, value in {"is_available": True, "device_count": 2, "set_device_index": None}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert choose_device(kind, Launch(1, 2, 1, 2)).type == kind
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
