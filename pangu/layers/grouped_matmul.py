"""Grouped matmul: rows sorted by group, each group with its own matrix."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from pangu.layers.recompute import end_recompute
from pangu.layers.routing import Dispatch, copy_to_rows, sum_rows
from pangu.layers.tensor_parallel_matmul import ALONE

if TYPE_CHECKING:
    from pangu.layers.weight_gradient_store import WeightGradientStore

ALIGNMENT = 16
"""Alignment in bytes of operands, and of their rows, in torch's grouped kernel."""
_LIBRARY = torch.library.Library("pangu", "FRAGMENT")


def _by_kernel(*operands: Tensor) -> bool:
    """Return whether torch's kernel supports these operands (last dimension contiguous); it has no fp64."""
    ways = ((x.dtype, x.shape[-1] * x.itemsize, x.data_ptr()) for x in operands)
    return all(dtype != torch.float64 and row % ALIGNMENT == start % ALIGNMENT == 0 for dtype, row, start in ways)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _matmul(x: Tensor, matrices: Tensor, ends: Tensor, transposed: bool, spare: bool) -> Tensor:
    weight = matrices.mT if transposed else matrices
    if _by_kernel(x, matrices):
        out = F.grouped_mm(x, weight, offs=ends)
    else:
        out = x.new_empty(x.shape[0], weight.shape[-1])
        for (start, stop), matrix in zip(_spans(ends), weight, strict=True):
            torch.mm(x[start:stop], matrix, out=out[start:stop])
    if not spare:
        return out
    # rows outside all groups are not written
    beyond = torch.arange(x.shape[0], dtype=ends.dtype, device=ends.device) >= ends[-1]
    return out.masked_fill_(beyond[:, None], 0.0)


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if _by_kernel(grad, x):
        return F.grouped_mm(grad.t(), x, offs=ends)
    return torch.stack([grad[start:stop].t() @ x[start:stop] for start, stop in _spans(ends)])


def _like_matmul(x: Tensor, matrices: Tensor, ends: Tensor, transposed: bool, spare: bool) -> Tensor:
    return x.new_empty(x.shape[0], matrices.shape[1 if transposed else 2])


def _like_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


_LIBRARY.define("grouped_matmul(Tensor x, Tensor matrices, Tensor ends, bool transposed, bool spare) -> Tensor")
_LIBRARY.define("grouped_weight_gradient(Tensor grad, Tensor x, Tensor ends) -> Tensor")
_LIBRARY.impl("grouped_matmul", _matmul, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_weight_gradient", _weight_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("pangu::grouped_matmul", _like_matmul, lib=_LIBRARY)
torch.library.register_fake("pangu::grouped_weight_gradient", _like_weight_gradient, lib=_LIBRARY)


def grouped_matmul(
    x: Tensor, weight: Tensor, dispatch: Dispatch, store: WeightGradientStore | None, takes_tokens: bool = False
) -> Tensor:
    """Return x Wᵀ of each group of rows with its own W.

    x [rows, inputs], sorted by group, or if `takes_tokens` [tokens, inputs], which rows copy and which alone are saved
    for the backward pass; weight [groups x outputs, inputs], a leaf whose gradient an open `store` takes -> [rows,
    outputs], 0 in rows outside all groups.
    """
    end_recompute(x, weight)
    return _GroupedMatmul.apply(x, weight, dispatch, store, takes_tokens)


def _rows(x: Tensor, dispatch: Dispatch, takes_tokens: bool) -> Tensor:
    return copy_to_rows(x, dispatch) if takes_tokens else x


def _multiply(x: Tensor, weight: Tensor, dispatch: Dispatch, transposed: bool) -> Tensor:
    ends = dispatch.ends
    matrices = weight.detach().view(len(ends), -1, weight.shape[-1])
    outputs: Tensor = torch.ops.pangu.grouped_matmul(x, matrices, ends, transposed, dispatch.spare)
    return outputs


class _GroupedMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dispatch: Dispatch, store: WeightGradientStore | None, takes_tokens: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # recompute turns saved tensors into copies, but gradients are for the parameter itself
        ctx.weight, ctx.dispatch, ctx.store, ctx.takes_tokens = weight, dispatch, store, takes_tokens
        return _multiply(_rows(x, dispatch, takes_tokens), weight, dispatch, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, dispatch = grads[0].contiguous(), ctx.dispatch
        grad_x = _multiply(grad, weight, dispatch, False)
        if ctx.takes_tokens:
            grad_x = sum_rows(grad_x, dispatch)
        gradient = partial(_gradient, grad, dispatch, ctx.takes_tokens)
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.store is not None and ctx.store.is_open:
            ctx.store.put(ctx.weight, x, ALONE, gradient)
        elif ctx.needs_input_grad[1]:
            grad_weight = gradient(x)
        return grad_x, grad_weight, None, None, None


def _gradient(grad: Tensor, dispatch: Dispatch, takes_tokens: bool, x: Tensor) -> Tensor:
    return torch.ops.pangu.grouped_weight_gradient(grad, _rows(x, dispatch, takes_tokens), dispatch.ends).flatten(0, 1)
