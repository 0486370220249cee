"""What the launcher says."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pangu.common.errors import LocalError, UserError
from pangu.common.exit_status import USER_ERROR, exit_status
from pangu.topology import launch
from pangu.topology.launch import (
    MEMBER,
    REMEMBERED_SHAPES,
    Launch,
    choose_device,
    choose_settings,
    is_first_process,
    number_on_node,
)
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SMALL


def test_without_a_launcher_there_is_one_process() -> None:
    assert Launch.from_environment({}) == Launch(0, 1, 0, 1)


def test_torchruns_variables() -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Launch.from_environment(values) == Launch(5, 8, 1, 4)
    again = {**values, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert Launch.from_environment({**again, "TORCHELASTIC_USE_AGENT_STORE": "True"}).attempt == 3
    assert Launch.from_environment({**again, "TORCHELASTIC_USE_AGENT_STORE": "False"}).attempt == 0


def test_an_epoch_is_believed_of_the_launcher_that_has_members_only() -> None:
    values = {"RANK": "0", "WORLD_SIZE": "3", "PANGU_EPOCH": "2"}
    assert Launch.from_environment(values).epoch == 0
    assert Launch.from_environment({**values, "PANGU_EPOCH": "x"}) == Launch(0, 3)
    assert Launch.from_environment({**values, MEMBER: "4@node0:29400"}).epoch == 2


def test_an_absent_accelerator_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"train\.device = cuda: this machine has no cuda device; set train.device=cpu"):
        choose_device("cuda", Launch())
    assert choose_device("auto", Launch()).type == "cpu"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Sequence[int]], None]]:
    """Makes a machine of it with so many GPUs, and so many cores for this process and for its launcher."""

    def machine(count: int, cores: Sequence[int]) -> None:
        for name, value in {"is_available": True, "device_count": count, "set_device_index": None}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(launch, "cpu_quota", lambda: math.inf)
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
    process = Launch(1, 2, 1, 2)
    devices(2, (2, 2))
    assert choose_device("cuda", process, {"CUDA_VISIBLE_DEVICES": "2,3"}) == torch.device("cuda", 1)
    devices(1, (2, 2))
    assert choose_device("cuda", process, {"CUDA_VISIBLE_DEVICES": "3"}) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"this machine has 1 cuda device\(s\), .*use at most --nproc-per-node=1"):
        choose_device("cuda", process, {})


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
        with pytest.raises(UserError, match=r"is not installed; pip install torch_npu==\d+\.\d+\.\d+ "):
            choose_device(requested, Launch())
    else:
        assert choose_device(requested, Launch()).type == "cpu"
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    importlib.invalidate_caches()
    message = rf"train.device = {requested}: .* \(libascendcl.so: cannot open .*\); for an Ascend"
    with pytest.raises(UserError, match=message):
        choose_device(requested, Launch())
    choose_device("cpu", Launch())


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"])
def test_settings_are_as_the_user_has_set_them(name: str) -> None:
    given = {name: "max_split_size_mb:128", "LRU_CACHE_CAPACITY": "7", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment = dict(given)
    choose_settings(environment)
    assert environment == {**given, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
    empty: dict[str, str] = {}
    choose_settings(empty)
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert empty == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **queues, **REMEMBERED_SHAPES}


RUN = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = x: must be a non-negative integer; start with torchrun"),
        ({**RUN, "LOCAL_RANK": ""}, "LOCAL_RANK = '': must be a non-negative integer"),
        ({**RUN, "WORLD_SIZE": "-2"}, "WORLD_SIZE = -2: must be a non-negative integer"),
        ({**RUN, "TORCHELASTIC_RESTART_COUNT": "9" * 5000}, "TORCHELASTIC_RESTART_COUNT = 9"),
        ({"RANK": "3"}, "RANK = 3: RANK and WORLD_SIZE must be set together; .* `unset RANK` for a single"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE = 8: RANK and WORLD_SIZE must be set together"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: must be less than WORLD_SIZE = 2"),
        ({**RUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK = 1: must be less than LOCAL_WORLD_SIZE = 1"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "srun started 8 unconnected processes"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5"}, r"srun .* \(SLURM_NTASKS\); .*torchrun or scripts/launch.py"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun started 2 unconnected processes"),
    ],
)
def test_variables_that_no_launcher_sets_are_one_message(environment: dict[str, str], said: str) -> None:
    with pytest.raises(LocalError, match=f"^{said}"):
        Launch.from_environment(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script itself
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {**RUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
    ],
)
def test_one_process_and_torchrun_may_run_in_slurm(environment: dict[str, str]) -> None:
    assert Launch.from_environment(environment).rank == 0


@pytest.mark.parametrize(
    ("variables", "status"), [({"RANK": "x"}, USER_ERROR), ({"RANK": "1", "WORLD_SIZE": "2"}, USER_ERROR)]
)
def test_the_message_comes_at_once(
    variables: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a process that leaves what is wrong for all to the first one to say; no address to meet at is set."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr("pangu.common.exit_status.FIRST_SPEAKS_SECONDS")
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "train.steps=1")
    assert exit_status(lambda: run(composed(*words, "train.device=cpu")), is_first_process) == status
    said = capsys.readouterr().err
    assert (": error: RANK = x" if variables["RANK"] == "x" else ": error: MASTER_ADDR = '', MASTER_PORT = ''") in said


@pytest.mark.parametrize(
    ("environment", "launchers", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, b"", 3),
        ({"OMP_NUM_THREADS": "5,2"}, b"", 5),
        ({"OMP_NUM_THREADS": "1"}, b"", 1),
        ({"OMP_NUM_THREADS": "no"}, b"", 4),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, b"HOME=/\0XOMP_NUM_THREADS=1", 4),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, b"HOME=/\0OMP_NUM_THREADS=1", 1),
    ],
)
def test_a_users_number_of_threads_is_taken_and_torchruns_is_not(
    environment: dict[str, str],
    launchers: bytes,
    threads: int,
    devices: Callable[[int, Sequence[int]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices(0, (8, 8))
    monkeypatch.setattr(Path, "read_bytes", lambda path: launchers)
    choose_device("cpu", Launch(1, 2, 1, 2), environment)
    assert torch.get_num_threads() == threads
    choose_device("cpu", Launch(1, 2, 1, 2), environment, threads=2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("quota", "threads"), [(3.5, 1), (4.0, 2), (0.5, 1), (100.0, 4)])
def test_processes_share_the_quota_of_their_container(
    quota: float, threads: int, devices: Callable[[int, Sequence[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(0, (8, 8))
    monkeypatch.setattr(launch, "cpu_quota", lambda: quota)
    choose_device("cpu", Launch(0, 2, 0, 2), {})
    assert torch.get_num_threads() == threads
