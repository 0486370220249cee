"""Saved tensors are computed again, or moved and brought back, once however many views of them there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.layers import offload
from pangu.layers.offload import Offload
from pangu.layers.recompute import SavedTensors, address


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("moves", [False, True])
def test_every_consumer_of_a_discarded_tensor_gets_it_again(moves: bool) -> None:
    """Products and a view of it; gradients as if it had been kept, bit for bit."""
    x, first, second = (numbers(seed, 64, 64) for seed in range(3))
    calls = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    def gradients(discard: bool) -> tuple[Tensor, ...]:
        saved = SavedTensors(Offload(x.device, set()) if moves else None)
        with saved.layer(last=False), saved.discarding(compute, x, discard) as y:
            out = y @ first + second @ y + y * y.t()
        with saved.layer(last=True):  # only now does the first layer give its memory back
            out = out * out
        del y
        return torch.autograd.grad(out.sum(), (x, first, second))

    kept = gradients(False)
    assert len(calls) == 1
    again = gradients(True)
    assert len(calls) == 2 + 4  # y, y, y and its transpose
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the host."""
    sizes: list[int] = []

    def counting(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes.append(numel * dtype.itemsize)
        return original(numel, dtype, device)

    original = offload.host_memory
    monkeypatch.setattr(offload, "host_memory", counting)
    return sizes


def test_memory_is_moved_once_for_all_its_views(moved: list[int]) -> None:
    """Parameters and what is small stay."""
    x, weight, small = numbers(0, 40, 40), numbers(1, 40, 80), numbers(2, 8, 8)
    with SavedTensors(Offload(x.device, {address(weight)})).layer(last=False):
        out = ((x * x.t()) @ weight).sum() + (small @ small).sum()
    assert out.requires_grad
    assert moved == [4 * 40 * 40] * 2  # x for both factors, and their product


def test_the_last_layer_stays_and_brings_the_one_before_it_back(moved: list[int]) -> None:
    """Before that one's own backward begins; gradients are as where nothing is moved, to the bit."""
    x, weight = numbers(0, 40, 40), numbers(1, 40, 40)
    events: list[str] = []

    class Noting(Offload):
        def _bring_back(self, layer: Any) -> None:
            events.append("brought back" if layer is not None and layer.blocks else "nothing to bring")
            super()._bring_back(layer)

    def gradients(saved: SavedTensors) -> tuple[Tensor, ...]:
        with saved.layer(last=False):
            out = x @ weight
        out.register_hook(lambda gradient: events.append("backward of the first"))
        first = len(moved)
        with saved.layer(last=True):
            out = out.sin() @ out
        assert len(moved) == first
        return torch.autograd.grad(out.sum(), (x, weight))

    kept = gradients(SavedTensors())
    events.clear()
    away = gradients(SavedTensors(Noting(x.device, set())))
    assert "brought back" in events[: events.index("backward of the first")]
    assert moved == [4 * 40 * 40] * 2
    assert all(torch.equal(a, b) for a, b in zip(kept, away, strict=True))


def test_evaluation_moves_nothing(moved: list[int]) -> None:
    saved, x = SavedTensors(Offload(torch.device("cpu"), set())), numbers(0, 64, 64)
    with torch.no_grad(), saved.layer(last=False), saved.discarding(torch.sin, x) as y:
        y @ y
    assert moved == []
