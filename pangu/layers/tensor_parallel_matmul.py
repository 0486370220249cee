"""Products with the matrices of a model, their communication hidden behind them, and lookups in its tables.

Communication overlaps in two ways. Products are cut along the sequence into `region.chunks` chunks: one is gathered or
summed while another is computed. And in backward of a column-parallel product the gather of x runs behind the product
for x's gradient, and the sum of that gradient (of its last chunk) behind the product for W's.

A product is two nodes of the graph: the first keeps what backward needs and does backward, the second computes the
value. A recompute (see `recompute`) ends where the last tensor is kept, and so before a product whose value nobody asks
for a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.regions import Pending, TensorRegion, start_gather, start_sum
from pangu.layers.weight_gradient_store import WeightGradientStore

ALONE = TensorRegion()
"""One rank: nothing to communicate."""


def column_parallel_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorRegion, weight_gradients: WeightGradientStore | None
) -> Tensor:
    """x Wᵀ + b where every rank holds some rows of W and b (Shoeybi et al. 2019, section 3).

    Args:
        x: [sequence (/ ranks with sequence parallelism), ..., inputs]. Only this much is kept for backward; it is
            gathered again there.
        weight: [outputs / ranks, inputs], a leaf.
        bias: [outputs / ranks], a leaf.
        region: the ranks. On one rank this is an ordinary product.
        weight_gradients: where backward puts the gradients of `weight` and `bias` aside while it holds them.

    Returns:
        [sequence, ..., outputs / ranks].
    """
    if region.size == 1 and weight_gradients is None:
        return F.linear(x, weight, bias)
    backward = _ColumnBackward.apply(x, weight, bias, x.shape[0] * region.num_slices, region, weight_gradients)
    return _Value.apply(backward, lambda: _in_order(_gathered_products(x, weight, bias, region)[1], region))


def row_parallel_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorRegion, weight_gradients: WeightGradientStore | None
) -> Tensor:
    """x Wᵀ + b where every rank holds some columns of W: the ranks' products are summed and the bias is added once.

    Args:
        x: [sequence, ..., inputs / ranks].
        weight: [outputs, inputs / ranks], a leaf.
        bias: [outputs], a leaf.
        region: the ranks. On one rank this is an ordinary product.
        weight_gradients: as for `column_parallel_matmul`.

    Returns:
        [sequence (/ ranks with sequence parallelism), ..., outputs].
    """
    if region.size == 1:
        return column_parallel_matmul(x, weight, bias, region, weight_gradients)

    def value() -> Tensor:
        total = _complete(_started_sums(x, weight, region))
        return total if bias is None else total.add_(bias)

    rows = x.shape[0] // region.num_slices
    return _Value.apply(_RowBackward.apply(x, weight, bias, rows, region, weight_gradients), value)


def lookup(ids: Tensor, table: Tensor, weight_gradients: WeightGradientStore | None) -> Tensor:
    """Rows of a table.

    Args:
        ids: int64 [...].
        table: [rows, width], a leaf.
        weight_gradients: as for `column_parallel_matmul`; a table that is also the head's matrix must get its gradient
            in one piece.

    Returns:
        [..., width].
    """
    return F.embedding(ids, table) if weight_gradients is None else _Lookup.apply(ids, table, weight_gradients)


def _gathered_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorRegion
) -> tuple[list[Tensor], list[Tensor]]:
    """Chunks of the ranks' slices, gathered, and the product of each; all gathers are under way before the first
    product. Without sequence parallelism nothing is gathered, and x is one chunk."""
    count = _count(x.shape[0], region) if region.slices_sequence else 1
    chunks = [start_gather(chunk, region) for chunk in x.tensor_split(count)]
    wholes, products = [], []
    for chunk in chunks:
        wholes.append(chunk.wait())
        products.append(F.linear(wholes[-1], weight, bias))
    return wholes, products


def _started_sums(x: Tensor, weight: Tensor, region: TensorRegion) -> list[Pending]:
    """Products of chunks of the whole x, each being summed while the next is computed.

    A chunk holds the same rows of every rank's slice, so that what a rank keeps of its sum is a chunk of its own slice.
    """
    slices = x.unflatten(0, (region.num_slices, -1))
    chunks = slices.tensor_split(_count(slices.shape[1], region), dim=1)
    return [start_sum(F.linear(chunk.flatten(0, 1), weight), region) for chunk in chunks]


def _count(rows: int, region: TensorRegion) -> int:
    return min(region.chunks, rows)


def _complete(sums: Sequence[Pending]) -> Tensor:
    parts = [part.wait() for part in sums]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _in_order(chunks: Sequence[Tensor], region: TensorRegion) -> Tensor:
    """The whole sequence from chunks that each hold the same rows of every rank's slice."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([chunk.unflatten(0, (region.num_slices, -1)) for chunk in chunks], dim=1).flatten(0, 1)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)


class _Value(Function):
    """The value of a product; its gradient goes to the node that knows what to do with it."""

    @staticmethod
    def forward(ctx: Any, backward: Tensor, value: Callable[[], Tensor]) -> Tensor:
        return value()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Backward(Function):
    """Does backward. What it returns stands for the product in the graph: its shape without its memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        region: TensorRegion,
        weight_gradients: WeightGradientStore | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # saved tensors come back as copies where a layer is recomputed, but a gradient is for the parameter itself
        ctx.weight, ctx.bias, ctx.region, ctx.weight_gradients = weight, bias, region, weight_gradients
        return x.new_empty(()).expand(rows, *x.shape[1:-1], weight.shape[0])


class _ColumnBackward(_Backward):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        region = ctx.region
        _, weight_trained, bias_trained, *_ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        if _holding(ctx):
            sums = _started_sums(grad, weight.t(), region)
            _put_aside(ctx, x, region, grad, grad)
            return _complete(sums), *[None] * 5
        whole = start_gather(x, region) if weight_trained else None
        sums = _started_sums(grad, weight.t(), region)
        grad_weight = None if whole is None else _weight_gradient(grad, whole.wait())
        return _complete(sums), grad_weight, _bias_gradient(grad) if bias_trained else None, None, None, None


class _RowBackward(_Backward):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        wholes, products = _gathered_products(grad, weight.t(), None, ctx.region)
        whole, grad_x = _in_order(wholes, ctx.region), _in_order(products, ctx.region)
        if _holding(ctx):
            _put_aside(ctx, x, ALONE, whole, grad)
            return grad_x, *[None] * 5
        _, weight_trained, bias_trained, *_ = ctx.needs_input_grad
        grad_weight = _weight_gradient(whole, x) if weight_trained else None
        return grad_x, grad_weight, _bias_gradient(grad) if bias_trained else None, None, None, None


def _holding(ctx: Any) -> bool:
    return ctx.weight_gradients is not None and ctx.weight_gradients.is_open


def _put_aside(ctx: Any, x: Tensor, region: TensorRegion, grad_weight: Tensor, grad_bias: Tensor) -> None:
    """The work for W, from x (gathered over `region`) and the output's gradient, and the work for b."""
    ctx.weight_gradients.put(ctx.weight, x, region, partial(_weight_gradient, grad_weight))
    if ctx.bias is not None:
        ctx.weight_gradients.put(ctx.bias, grad_bias, ALONE, _bias_gradient)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, weight_gradients: WeightGradientStore) -> Tensor:
        ctx.table, ctx.weight_gradients = table, weight_gradients
        ctx.save_for_backward(ids)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors

        def gradient(grad: Tensor) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, ids, ctx.table.shape[0], -1, False)

        if ctx.weight_gradients.is_open:
            ctx.weight_gradients.put(ctx.table, grads[0], ALONE, gradient)
            return None, None, None
        return None, gradient(grads[0]), None
