"""Linear function of a tensor whose backward pass is another given function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

Map = Callable[[Tensor, Any], Tensor]


class _Conjugate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Any, forwards: Map, backwards: Map) -> Tensor:
        ctx.where, ctx.backwards = where, backwards
        return forwards(x, where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backwards(grads[0], ctx.where), None, None, None


def conjugate(x: Tensor, where: Any, forwards: Map, backwards: Map) -> Tensor:
    """Return `forwards(x, where)`, which must not be `x` itself; its gradient is `backwards(gradient, where)`."""
    return _Conjugate.apply(x, where, forwards, backwards)
