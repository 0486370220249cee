"""What the launcher says."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pangu.config.errors import UserError
from pangu.topology.accelerator import number_on_node
from pangu.topology.launch import REMEMBERED_SHAPES, Launch, choose_device, choose_memory_settings


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


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Sequence[int]], None]]:
    """Makes a machine of it with so many GPUs, and so many cores for this process and for its launcher."""

    def machine(count: int, cores: Sequence[int]) -> None:
        for name, value in {"is_available": True, "device_count": count, "set_device_index": None}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores[process != 0])), raising=False)

    threads = torch.get_num_threads()
    yield machine
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("cores", "threads"), [((7, 7), 3), ((4, 16), 4), ((8, 12), 6), ((1, 64), 1)], ids=["whole", "bound", "shared", "1"]
)
def test_processes_share_the_cores_of_their_machine(
    kind: str, cores: tuple[int, int], threads: int, devices: Callable[[int, Sequence[int]], None]
) -> None:
    """torchrun leaves each one core; beside an accelerator as well, the host updates what is offloaded. One that is
    bound to some of the launcher's cores does not share those with processes that are bound elsewhere."""
    devices(2, cores)
    assert choose_device(kind, Launch(1, 2, 1, 2), {}).type == kind
    assert torch.get_num_threads() == threads


def test_a_device_that_a_process_is_shown_alone_is_its_first(devices: Callable[[int, Sequence[int]], None]) -> None:
    launch = Launch(1, 2, 1, 2)
    devices(2, (2, 2))
    assert choose_device("cuda", launch, {"CUDA_VISIBLE_DEVICES": "2,3"}) == torch.device("cuda", 1)
    devices(1, (2, 2))
    assert choose_device("cuda", launch, {"CUDA_VISIBLE_DEVICES": "3"}) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"this machine has 1 cuda device\(s\) .*at most --nproc-per-node=1 works"):
        choose_device("cuda", launch, {})


def test_the_number_of_a_device_on_its_node_is_what_the_process_was_shown() -> None:
    for shown, index, number in (("", 0, "0"), ("4,5", 1, "5"), (" 6 , 7", 0, "6"), ("4", 1, "1")):
        assert number_on_node(torch.device("cuda", index), {"CUDA_VISIBLE_DEVICES": shown}) == number
    assert number_on_node(torch.device("cuda", 2), {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}) == "2"


@pytest.mark.parametrize("requested", ["npu", "auto"])
def test_a_plug_in_that_cannot_be_imported_is_told_with_its_cause(
    requested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if requested == "npu":
        with pytest.raises(UserError, match=r"is not installed: pip install torch_npu==\d+\.\d+\.\d+, of"):
            choose_device(requested, Launch())
    else:
        assert choose_device(requested, Launch()).type == "cpu"
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    importlib.invalidate_caches()
    message = rf"train.device = {requested}: .* \(libascendcl.so: cannot open .*\); that of an Ascend, torch_npu, needs"
    with pytest.raises(UserError, match=message):
        choose_device(requested, Launch())
    choose_device("cpu", Launch())


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"])
def test_memory_settings_are_as_the_user_has_set_them(name: str) -> None:
    given = {name: "max_split_size_mb:128", "LRU_CACHE_CAPACITY": "7"}
    environment = dict(given)
    choose_memory_settings(environment)
    assert environment == {**given, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
    empty: dict[str, str] = {}
    choose_memory_settings(empty)
    assert empty == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **REMEMBERED_SHAPES}
