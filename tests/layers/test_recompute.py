"""Saved tensors are computed again, or moved and brought back, once however many views of them there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pangu.layers import offload, recompute
from pangu.layers.offload import Offload
from pangu.layers.recompute import SavedTensors, address, checkpointed
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul
from pangu.layers.weight_gradient_store import WeightGradientStore


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


class Pair(NamedTuple):
    hidden: Tensor
    other: Tensor | None


def repeats() -> bool:
    """Whether a forward pass is being repeated in this thread."""
    return recompute._thread.num_left < math.inf


def two_products(pair: Pair, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, which share what the first factor saves."""
    inner = pair.hidden.sin()
    return (inner @ weight).tanh(), (inner * inner).sum()


@pytest.mark.parametrize("moves", [False, True])
def test_arguments_inside_tuples_are_moved_and_nothing_else_is_saved(moves: bool, moved: list[int]) -> None:
    x, weight = numbers(0, 40, 40), numbers(1, 40, 40)

    def gradients(on: bool) -> tuple[Tensor, ...]:
        saved = SavedTensors(Offload(x.device, {address(weight)}) if moves else None)
        with saved.layer(last=False):
            hidden = x * 2
            first, second = checkpointed(two_products, Pair(hidden, None), weight, on=on)
            del hidden
        with saved.layer(last=True):
            out = first.sum() + second
        return torch.autograd.grad(out, (x, weight))

    kept = gradients(False)
    moved.clear()
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(True), strict=True))
    assert moved == [4 * 40 * 40] * moves


def test_a_checkpoint_inside_another_is_repeated_by_both() -> None:
    x, weight, calls = numbers(0, 8, 8), numbers(1, 8, 8), list[tuple[str, bool]]()

    def inside(x: Tensor) -> Tensor:
        calls.append(("inside", repeats()))
        return (x @ weight).sin().exp()

    def around(x: Tensor, on: bool) -> Tensor:
        calls.append(("around", repeats()))
        return checkpointed(inside, x.cos(), on=on).tanh() * x

    kept = torch.autograd.grad(around(x, False).sum(), (x, weight))
    calls.clear()
    again = torch.autograd.grad(checkpointed(around, x, True).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    # the last call is the inner one's own
    assert calls == [("around", False), ("inside", False), ("around", True), ("inside", True), ("inside", True)]
    assert not repeats()


def test_a_checkpoint_of_torch_around_one_repeats_all_that_it_saved() -> None:
    """Matmuls outside of the inner one, whose recompute needs a single tensor, must not end that of the outer one."""
    x, first, second = (numbers(seed, 8, 8) for seed in range(3))

    def around(x: Tensor, on: bool) -> Tensor:
        for weight in (first, second):
            x = column_parallel_matmul(x, weight, None, ALONE, WeightGradientStore()).tanh()
        return checkpointed(torch.sin, x, on=on)

    kept = torch.autograd.grad(around(x, False).sum(), (x, first, second))
    again = torch.autograd.grad(checkpoint(around, x, True, use_reentrant=False).sum(), (x, first, second))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_a_frozen_matmul_does_not_end_a_recompute() -> None:
    """It saves nothing, as it gets no gradient; the trained one saves the last two tensors."""
    x, frozen, trained = numbers(0, 8, 8).detach(), numbers(1, 8, 8).detach(), numbers(2, 8, 8)

    def compute(x: Tensor) -> Tensor:
        for weight in (frozen, trained):
            x = column_parallel_matmul(x, weight, None, ALONE, WeightGradientStore())
        return x

    kept, again = (torch.autograd.grad(checkpointed(compute, x, on=on).sum(), trained)[0] for on in (False, True))
    assert torch.equal(kept, again)


def test_an_error_of_a_recompute_is_that_of_the_backward_pass() -> None:
    x = numbers(0, 8, 8)

    def fails(x: Tensor) -> Tensor:
        if repeats():
            raise KeyError("of the recompute")
        return x.sin()

    with pytest.raises(KeyError, match="of the recompute"):
        checkpointed(fails, x).sum().backward()
    assert not repeats()
    with pytest.raises(RuntimeError, match="1 tensors less"):
        checkpointed(lambda x: x if repeats() else x.sin(), x).sum().backward()


def test_backward_passes_of_one_graph() -> None:
    """One after another, whole and in parts: each tensor is there again, or still."""
    x, weight = numbers(0, 8, 8), numbers(1, 8, 8)
    calls = []

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(repeats())
        return two_products(*arguments)

    def outputs(on: bool) -> list[Tensor]:
        return [out.sum() for out in checkpointed(noted, Pair(x, None), weight, on=on)]

    kept = [torch.autograd.grad(out, x, retain_graph=True)[0] for out in (*outputs(False), sum(outputs(False)))]
    calls.clear()
    first, second = outputs(True)
    whole = [torch.autograd.grad(first + second, x, retain_graph=True)[0] for _ in range(2)]
    assert calls == [False, True, True]
    assert all(torch.equal(kept[2], one) for one in whole)
    parts = [torch.autograd.grad(one, x, retain_graph=True)[0] for one in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(kept, parts, strict=False))
    first, second = outputs(True)
    (weight_grad,) = torch.autograd.grad(first, weight, retain_graph=True)
    (gradient,) = torch.autograd.grad(second, x)
    assert torch.equal(gradient, kept[1])
    assert torch.equal(weight_grad, torch.autograd.grad(outputs(False)[0], weight)[0])


class Noting(Function):
    """exp(x), which saves its output and notes, as it goes back, how many tensors of the recompute are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[StorageWeakRef], alive: list[int]) -> Tensor:
        ctx.made, ctx.alive, out = made, alive, x.exp()
        ctx.save_for_backward(out)
        made.append(StorageWeakRef(out.untyped_storage()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        ctx.alive.append(sum(not one.expired() for one in ctx.made))
        return grads[0] * out, None, None


@pytest.mark.parametrize("through", [checkpointed, partial(checkpoint, use_reentrant=False, preserve_rng_state=False)])
def test_each_recomputed_tensor_is_freed_once_its_node_is_done(through: Callable[..., Tensor]) -> None:
    """As by torch's own checkpoint; what a node saves that the forward pass drops is not kept."""
    made, alive = list[StorageWeakRef](), list[int]()

    def compute(x: Tensor) -> Tensor:
        for _ in range(3):
            Noting.apply(x * 0.1, made, alive)
            x = Noting.apply(x * 0.1, made, alive)
        return x

    out = through(compute, numbers(0, 8, 8))
    assert [one.expired() for one in made] == [True] * 5 + [False]
    made.clear()
    total = out.sum()
    del out
    total.backward()
    assert alive == [3, 2, 1]
    assert all(one.expired() for one in made)


def test_a_backward_pass_in_another_thread_recomputes_there() -> None:
    x, flags = numbers(0, 8, 8), list[bool]()

    def compute(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            flags.extend((repeats(), other.submit(repeats).result()))
        return x.sin()

    with ThreadPoolExecutor(1) as other:
        other.submit(checkpointed(compute, x).sum().backward).result()
    assert flags == [False, False, True, False]
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())
