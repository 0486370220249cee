"""Communication is started before the product that hides it, and waited for after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pangu.collectives.regions import TensorRegion
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


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_of_a_row_product_overlap(events: list[str], sequence: bool) -> None:
    x = torch.randn(10, 3, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    y = row_parallel_matmul(x, weight, None, TensorRegion(0, 2, sequence=sequence, chunks=2), None)
    assert events == [*SUMMED, *WAITED]
    assert torch.allclose(y, 2 * (x @ weight.t())[: 5 if sequence else 10])
    events.clear()
    y.sum().backward()
    whole = ["start gather", "wait for gather", "product"]  # of one rank's gradient: nothing is sent
    assert events == [*(GATHERED if sequence else whole), "weight gradient"]
