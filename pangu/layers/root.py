"""Root of a backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Root(Function):
    """Scalar whose `backward()` continues in the graph of tensors, with gradients that a list provides by then."""

    # It keeps the graph of the tensors, not their values. torch.autograd.backward with gradients would import SymPy to
    # compare shapes: 35 MiB and 0.3 s per process.
    #
    # forward     tensors -> Root -> root
    # backward    root.backward() -> gradients -> the graph of the tensors

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        """Return a scalar root of `tensors`, whose `gradients` are filled in later."""
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        return None, *ctx.gradients
