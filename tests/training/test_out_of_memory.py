"""A device that is full ends a run in one message, whatever the run was doing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pangu.common.errors import LocalError, allocating
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.tasks.arguments import connected
from pangu.topology.launch import Launch
from pangu.training.step import Trainer
from pangu.training.validation import Validation
from tests.training.test_resume import train

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 12.31 GiB is "
    "free. Including non-PyTorch memory, this process has 66.83 GiB memory in use. Of the allocated memory 60.01 GiB "
    "is allocated by PyTorch, and 5.50 GiB is reserved by PyTorch but unallocated."
)
NPU = (
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 58.10 GiB already allocated; "
    "58.10 GiB current active; 123.40 MiB free; 59.00 GiB reserved in total by PyTorch)"
)
"""Older releases of torch say the same of CUDA."""


@pytest.mark.parametrize(
    ("error", "sizes"),
    [
        (torch.OutOfMemoryError(CUDA), ", 20.00 GiB requested, 12.31 GiB free"),
        (RuntimeError(NPU), ", 2.00 GiB requested, 123.40 MiB free"),
        (torch.AcceleratorError("CUDA error: out of memory"), ""),
        (torch.OutOfMemoryError(), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_message_has_the_sizes_that_torch_names(error: RuntimeError, sizes: str) -> None:
    with pytest.raises(LocalError) as raised, allocating(lambda: "rank 3", "less works"):
        raise error
    assert str(raised.value) == f"rank 3: out of memory{sizes}; less works"
    assert raised.value.__cause__ is error


def test_a_host_that_is_full_counts_and_other_errors_pass() -> None:
    with pytest.raises(LocalError, match=r"^here: out of memory, 2000000000000000 bytes requested; "):  # noqa: SIM117
        with allocating(lambda: "here", ""):
            torch.empty(2 * 10**15, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), allocating(lambda: "here", ""):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def full(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError(CUDA)


@pytest.mark.parametrize(
    ("phase", "name", "operation", "place"),
    [
        (Trainer, "__init__", (torch, "zeros"), r"rank 0 on \S+"),
        (Trainer, "forward_backward", (F, "linear"), r"rank 0 \(cpu\), step 1, forward and backward, F of chunk 0, .*"),
        (Trainer, "update", (torch, "zeros"), r"rank 0 \(cpu\), step 1, adding up loss and norm"),
        (Validation, "figures", (F, "linear"), r"rank 0 \(cpu\), step 2, validating"),
    ],
)
def test_a_run_says_where_it_ran_out_and_what_needs_less(
    phase: type, name: str, operation: tuple[Any, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = getattr(phase, name)

    def without_memory(*given: Any) -> Any:
        with patch.object(*operation, full):
            return method(*given)

    monkeypatch.setattr(phase, name, without_memory)
    with IndexedWriter(tmp_path / "text", 64) as writer:
        writer.add(np.arange(32 * 5 + 1) % 64)
    files = ("data=indexed", f"data.train=[{tmp_path}/text]", f"data.validation=[{tmp_path}/text]")
    with pytest.raises(LocalError) as raised:
        train(tmp_path / "run", 1, *files, "validation.every=1", "validation.sequences=4")
    advice = "try batch.micro_size=1 or memory.recompute=selective, then full; dry_run=true in the same "
    said = rf"{place}: out of memory, 20.00 GiB requested, 12.31 GiB free; {advice}command .*"
    assert re.fullmatch(said, str(raised.value)), str(raised.value)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_commands_that_load_a_model_say_the_same() -> None:
    said = r"rank 0 on \S+: out of memory, 20.00 GiB requested, 12.31 GiB free; try a smaller --rows, or .*"
    with pytest.raises(LocalError, match=said), connected(1, 1, "cpu", Launch(), replicas=False):
        full()
