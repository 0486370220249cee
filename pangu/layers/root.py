"""Where a backward begins."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Root(Function):
    """The scalar from which backward goes through tensors whose gradients stand in a list by then: `root.backward()`.
    It keeps the graph that made them, not their values. (`torch.autograd.backward`, given gradients, compares their
    shapes by way of SymPy, whose import takes each process 35 MiB and a third of a second.)"""

    # forward     tensors -> Root -> root
    # backward    root.backward() -> gradients -> the graph of the tensors

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
