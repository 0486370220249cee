"""Communication is started before the product that hides it, and waited for after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pangu.collectives.regions import TensorRegion
from pangu.layers import fp8
from pangu.layers import tensor_parallel_matmul as matmul
from pangu.layers.tensor_parallel_matmul import column_parallel_matmul, row_parallel_matmul


@dataclass
class Pretended:
    """A collective of two ranks that hold the same."""

    name: str
    tensor: Tensor
    events: list[str]

    def __post_init__(self) -> None:
        self.events.append(f"start {self.name}")

    def __call__(self) -> Tensor:
        self.events.append(f"wait for {self.name}")
        return self.tensor


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What products do, in order."""
    seen: list[str] = []

    def noting(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Tensor | None) -> Tensor:
            seen.append(name)
            return original(*arguments)

        return call

    def gather(x: Tensor, region: TensorRegion) -> Pretended:
        return Pretended("gather", torch.cat([x] * region.num_slices), seen)

    def add(x: Tensor, region: TensorRegion) -> Pretended:
        return Pretended("sum", 2 * x.chunk(region.num_slices)[0], seen)

    monkeypatch.setattr(matmul, "start_gather", gather)
    monkeypatch.setattr(matmul, "start_sum", add)
    monkeypatch.setattr(matmul.F, "linear", noting("product", torch.nn.functional.linear))
    monkeypatch.setattr(matmul, "_weight_gradient", noting("weight gradient", matmul._weight_gradient))
    return seen


GATHERED = ["start gather", "start gather", "wait for gather", "product", "wait for gather", "product"]
SUMMED = ["product", "start sum", "product", "start sum"]
WAITED = ["wait for sum", "wait for sum"]


@pytest.mark.parametrize("length", [2, 5])
def test_chunks_of_a_column_product_overlap(events: list[str], length: int) -> None:
    x = torch.randn(length, 3, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    y = column_parallel_matmul(x, weight, None, TensorRegion(0, 2, sequence=True, chunks=2), None)
    assert events == GATHERED
    assert torch.allclose(y, torch.cat([x, x]) @ weight.t())
    events.clear()
    y.sum().backward()
    assert events == ["start gather", *SUMMED, "wait for gather", "weight gradient", *WAITED]


def test_a_weight_is_cast_to_fp8_while_chunks_are_gathered(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk that has come, the weight, and the next chunk; backward, the gradient in both orientations at once."""
    original, names = fp8.cast, {(True, False): "cast", (False, True): "transpose", (True, True): "both"}

    def cast(x: Tensor, scale: Tensor, amax: Tensor, *outs: Tensor | None) -> None:
        events.append(names[outs[0] is not None, outs[1] is not None])
        original(x, scale, amax, *outs)

    monkeypatch.setattr(fp8, "cast", cast)
    scales = fp8.Fp8Scales({"layers.0.weight": (16, 16)}, torch.device("cpu"))
    scales.known = True
    x, weight = torch.randn(2, 3, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    region = TensorRegion(0, 2, sequence=True, chunks=2)
    y = column_parallel_matmul(x, weight, None, region, None, fp8=scales.of("layers.0.weight"))
    gathered = ["start gather", "start gather", "wait for gather"]
    assert events == [*gathered, "cast", "both", "product", "wait for gather", "cast", "product"]
    events.clear()
    y.sum().backward()
    gradient = ["wait for gather", "weight gradient", "transpose", "product"]
    assert events == ["start gather", "both", *SUMMED, *gradient, *WAITED]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_in_fp8_have_the_gradients_of_one(events: list[str], chunks: int) -> None:
    """The second rank of two sends what the first does; sums of small powers of two are exact."""
    scales = fp8.Fp8Scales({"layers.0.weight": (6, 4)}, torch.device("cpu"))
    scales.known = True
    x = torch.randint(-3, 4, (8, 1, 4)).float().requires_grad_()
    weight = torch.randint(-3, 4, (6, 4)).float().requires_grad_()
    region, grad = TensorRegion(0, 2, sequence=True, chunks=chunks), torch.randint(-3, 4, (4, 1, 6)).float()
    row_parallel_matmul(x, weight, None, region, None, scales.of("layers.0.weight")).backward(grad)
    whole = torch.cat([grad, grad])
    assert x.grad is not None
    assert torch.equal(x.grad, whole @ weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, whole.flatten(0, 1).t() @ x.flatten(0, 1))


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_of_a_row_product_overlap(events: list[str], sequence: bool) -> None:
    x = torch.randn(10, 3, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    y = row_parallel_matmul(x, weight, None, TensorRegion(0, 2, sequence=sequence, chunks=2), None)
    assert events == [*SUMMED, *WAITED]
    assert torch.allclose(y, 2 * (x @ weight.t())[: 5 if sequence else 10])
    events.clear()
    y.sum().backward()
    assert events == [*(GATHERED if sequence else ["product"]), "weight gradient"]  # without it nothing is sent
