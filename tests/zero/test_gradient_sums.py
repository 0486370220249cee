"""Gradients are added to sums that a reduction can free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from pangu.zero.gradients import GradientSum
from pangu.zero.weight_gradients import GradientAccumulator


class Sums:
    """The sum of one parameter, which its reduction frees."""

    def __init__(self) -> None:
        self.total: Tensor | None = torch.zeros(3, 2)
        self.reduced = self.total.clone()

    def sum_of(self, parameter: Tensor, cleared: bool = False) -> tuple[Tensor, bool]:
        """A view of the sum, like that of a flat parameter."""
        assert self.total is not None
        return self.total[: len(parameter)] if parameter.dim() > 1 else self.total[0], False

    def complete(self, parameter: Tensor) -> None:
        """Reduce the sum."""
        assert self.total is not None
        sum_of_all, self.reduced = ref(self.total.untyped_storage()), self.total.clone()
        self.total = None
        assert sum_of_all() is None


@pytest.mark.parametrize("kind", ["hook", "matmul", "rows", "lookup"])
def test_a_reduction_frees_the_sum_that_its_last_gradient_was_added_to(kind: str) -> None:
    """It may start others, whose buffers would be allocated beside this one."""
    sums, weight = Sums(), nn.Parameter(torch.zeros(3, 2))
    model: Any = SimpleNamespace(input_matrix=None, embedding=nn.Module(), layers=nn.Module(), turns=())
    accumulator = GradientAccumulator(cast(GradientSum, sums), model)
    match kind:
        case "hook":
            weight.grad = torch.ones(3, 2)
            GradientSum._add(cast(GradientSum, sums), weight)
        case "matmul":
            accumulator.add(weight, torch.ones(3, 1), torch.ones(1, 2))
        case "rows":
            accumulator.add_rows(torch.zeros(2), torch.ones(4, 2))
        case _:
            accumulator.add_lookup(weight, torch.tensor([0, 1]), torch.ones(2, 2))
    assert sums.total is None
    assert sums.reduced.sum() == {"rows": 8, "lookup": 4}.get(kind, 6)
