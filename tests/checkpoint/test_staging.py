"""What is saved is copied into memory that the next save uses again."""

from __future__ import annotations

import subprocess
import sys
import time
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.checkpoint import staging
from pangu.checkpoint.files import Slice
from pangu.checkpoint.staging import StagingMemory

CPU = torch.device("cpu")


def slices(*tensors: Tensor) -> list[tuple[str, Slice]]:
    return [(str(i), Slice(tensor, tuple(tensor.shape), (0, 0))) for i, tensor in enumerate(tensors)]


def staging_that(keeps: bool) -> StagingMemory:
    """On a CPU, one that keeps its memory as one of a device does, or not."""
    made = StagingMemory(CPU, [])
    made._keeps = keeps
    return made


@pytest.mark.parametrize(("keeps", "chunk_bytes"), [(False, 0), (True, 1024), (True, 2**30)])
def test_copies_stay_as_they_are_while_the_originals_change(
    keeps: bool, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several chunks are filled, one tensor is larger than a chunk, and formats are widened."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", chunk_bytes)
    shapes = [(5, 7), (1,), (40, 40), (3, 3), (11, 13), (2, 1), (16, 16), (1, 17)]
    formats = [torch.float32, torch.bfloat16, torch.float32, torch.float64]
    originals = [torch.randn(shape, dtype=formats[i % 4]) for i, shape in enumerate(shapes)]
    expected = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in originals]
    expected = [tensor.clone() for tensor in expected]
    copies, _ = staging_that(keeps).copy(slices(*originals))
    for tensor in originals:
        tensor.zero_()
    for (name, part), tensor in zip(copies, expected, strict=True):
        assert part.tensor.is_contiguous(), name
        assert part.tensor.data_ptr() % 64 == 0
        torch.testing.assert_close(part.tensor, tensor, rtol=0, atol=0)


def test_the_next_save_takes_the_same_memory() -> None:
    """One that has more to save, too: before the first step there are no moments."""
    held, tensors = staging_that(keeps=True), [torch.randn(30, 30) for _ in range(6)]
    places = [part.tensor.data_ptr() for _, part in held.allocate(slices(*tensors))]
    assert len(set(places)) == 6
    for count in (2, 6):
        copies, _ = held.copy(slices(*tensors[:count]))
        assert [part.tensor.data_ptr() for _, part in copies] == places[:count]


class Slow:
    """Memory that is filled a while after it may be."""

    def __init__(self, may_be_filled: Event) -> None:
        self.may_be_filled, self.filled = may_be_filled, False

    def copy_(self, _: Tensor) -> None:
        self.may_be_filled.wait(300)
        time.sleep(0.05)
        self.filled = True


@pytest.mark.parametrize("way", ["synchronize", "wait"])
def test_what_is_offloaded_is_copied_by_a_thread(way: str) -> None:
    """Writers wait for it, and the update."""
    may_be_filled = Event()
    pairs: Any = [(Slow(may_be_filled), torch.zeros(1)) for _ in range(2)]
    event = staging._HostCopies(CPU, pairs)
    assert not pairs[1][0].filled
    may_be_filled.set()
    getattr(event, way)()
    assert pairs[0][0].filled
    assert pairs[1][0].filled


def test_a_process_that_ends_while_a_thread_copies_has_its_own_status() -> None:
    code = "import sys, torch; from pangu.checkpoint.staging import _HostCopies; one = torch.ones(2**26); "
    code += "event = _HostCopies(one.device, [(torch.empty_like(one), one)] * 4); sys.exit(2)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2


def test_a_copy_that_fails_is_the_saves_and_not_the_steps() -> None:
    event = staging._HostCopies(CPU, [(torch.empty(2), torch.ones(3))])
    event.wait()
    with pytest.raises(RuntimeError, match="size"):
        event.synchronize()


def test_nothing_is_a_save_too() -> None:
    """Of a replica whose tensors others write."""
    copies, _ = StagingMemory(CPU, []).copy([])
    assert not list(copies)
