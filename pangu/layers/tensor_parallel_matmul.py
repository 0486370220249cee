"""Tensor-parallel matmuls that overlap their communication, and embedding lookups.

Communication overlaps in two ways. Matmuls are split along the sequence into `region.chunks` chunks: one is gathered or
summed while another is computed. In the backward pass of a column-parallel one, dgrad hides the gather of x, and wgrad
hides the sum of dx (of its last chunk):

    communication   | gather x            | sum dx, chunk 1 | sum dx, chunk 2 |
    computation     | dx of chunk 1 | dx of chunk 2 | dW = dyᵀ x      |

A recompute ends when the last tensor is saved, and so before a matmul whose value is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.regions import TensorRegion, start_gather, start_sum
from pangu.layers.attention import split_projections, stack_projections
from pangu.layers.fp8_blocks import BlockScaledMatmuls, by_sample
from pangu.layers.recompute import end_recompute, is_discarded

if TYPE_CHECKING:
    from pangu.layers.fp8 import Fp8Matmuls, Operands
    from pangu.layers.weight_gradient_store import WeightGradientStore

    Store = WeightGradientStore | None
    Fp8 = Fp8Matmuls | None  # or `BlockScaledMatmuls`, of which `casts_once` is False

ALONE = TensorRegion()
Heads = tuple[Sequence[int], int] | None
"""Widths of the projections and the head size of an output that is split into heads (`split_projections`)."""
Multiply = Callable[[Tensor], Tensor]


class Use(NamedTuple):
    """Weight with its options in a matmul."""

    weight: Tensor
    bias: Tensor | None
    region: TensorRegion
    store: Store
    fp8: Fp8 = None
    heads: Heads = None


def column_parallel_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    region: TensorRegion,
    store: Store,
    fp8: Fp8 = None,
    heads: Heads = None,
) -> Any:
    """Return x Wᵀ + b where every rank holds some rows of W and b (Shoeybi et al. 2019, section 3).

    x [sequence (/ ranks with sequence parallelism), ..., inputs], weight [outputs / ranks, inputs], bias [outputs /
    ranks] -> [sequence, ..., outputs / ranks]. x is saved as it is and gathered again in the backward pass; an open
    `store` takes the gradients of weight and bias, which are leaves. `fp8` is for training; communication keeps the
    dtype of x. With `heads`, the output is split in the same node, so that its gradient can be taken without a copy.
    """
    fp8 = fp8 if torch.is_grad_enabled() else None
    if region.size == 1 and store is None and fp8 is None:
        output = F.linear(x, weight, bias)
        return output if heads is None else split_projections(output, *heads)
    kind = LocalMatmul if region.size == 1 else ColumnParallelMatmul
    return _node(kind, x, Use(weight, bias, region, store, fp8, heads))


def row_parallel_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorRegion, store: Store, fp8: Fp8 = None
) -> Tensor:
    """Return x Wᵀ + b where every rank holds some columns of W; results are summed, and the bias is added once.

    x [sequence, ..., inputs / ranks], weight [outputs, inputs / ranks], bias [outputs] -> [sequence (/ ranks with
    sequence parallelism), ..., outputs]. Otherwise like `column_parallel_matmul`.
    """
    if region.size == 1:
        return column_parallel_matmul(x, weight, bias, region, store, fp8=fp8)
    fp8 = fp8 if torch.is_grad_enabled() else None
    return _node(RowParallelMatmul, x, Use(weight, bias, region, store, fp8))


def lookup(ids: Tensor, table: Tensor, store: Store, completes: bool = True) -> Tensor:
    """Return rows [..., width] of a table [rows, width], which is a leaf; `completes`: no other gradient follows."""
    # a table that is also the head's matrix needs one gradient, so this one goes through the `store` as well
    return F.embedding(ids, table) if store is None else _Lookup.apply(ids, table, store, completes)


def _linear(fp8: Fp8, weight: Tensor, bias: Tensor | None = None) -> Multiply:
    return (lambda rows: F.linear(rows, weight, bias)) if fp8 is None else fp8.linear(weight, bias)


def _transposed(fp8: Fp8, weight: Tensor) -> Multiply:
    return _linear(None, weight.t()) if fp8 is None else fp8.input_gradient(weight)


def _of_rows(x: Tensor, multiply: Multiply) -> Tensor:
    # flat: for a batch of one, whose strides are arbitrary, torch would multiply each row by itself
    rows = multiply(x.flatten(0, -2))
    return rows.view(*x.shape[:-1], rows.shape[-1])


def _gather_and_multiply(x: Tensor, multiply: Multiply, region: TensorRegion) -> tuple[list[Tensor], list[Tensor]]:
    """Return gathered chunks of x and their outputs; all gathers start before the first matmul."""
    # without sequence parallelism, x is one chunk
    if not region.slices_sequence:
        return [x], [_of_rows(x, multiply)]
    gathers = [start_gather(chunk, region) for chunk in x.tensor_split(min(region.chunks, x.shape[0]))]
    wholes, values = [], []
    for wait in gathers:
        wholes.append(wait())
        values.append(_of_rows(wholes[-1], multiply))
    return wholes, values


def _multiply_and_sum(x: Tensor, multiply: Multiply, region: TensorRegion) -> list[Callable[[], Tensor]]:
    """Return the outputs for chunks of the full x, each being summed while the next is computed."""
    # A chunk holds the same rows of every rank's slice, so that a rank's part of its sum is a chunk of the rank's
    # slice: with 2 ranks and 2 chunks of 8 rows, rank 0 stores rows 0 to 3, and the chunks are rows 0 1 4 5 and rows 2
    # 3 6 7.
    slices = x.unflatten(0, (region.num_slices, -1))
    chunks = slices.tensor_split(min(region.chunks, slices.shape[1]), dim=1)
    values = (multiply(chunk.flatten(0, -2)).unflatten(0, (-1, *chunk.shape[2:-1])) for chunk in chunks)
    return [start_sum(value, region) for value in values]


def _finish(sums: Sequence[Callable[[], Tensor]]) -> Tensor:
    parts = [wait() for wait in sums]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _in_order(chunks: Sequence[Tensor], region: TensorRegion) -> Tensor:
    # Each chunk holds the same rows of every rank's slice: restore the order of the sequence.
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([chunk.unflatten(0, (region.num_slices, -1)) for chunk in chunks], dim=1).flatten(0, 1)


def _gradients(use: Use, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the matmuls of the input and of the weight, and the bias, get of an output gradient."""
    rows, fp8 = grad.flatten(0, -2), use.fp8
    if fp8 is None or not fp8.casts_once or not use.weight.requires_grad:
        return grad, rows.t(), rows
    cast = fp8.gradient(rows, sums=use.bias is not None and use.bias.requires_grad)
    return cast.rows.view(grad.shape), cast.columns, cast.sums


def _weight_gradient(use: Use, left: Tensor, x: Tensor) -> Tensor | None:
    """Return left [outputs, rows] times the rows of x, unless it is added to a sum; in fp8, x may have been cast."""
    right, fp8 = x.flatten(0, -2), use.fp8
    if isinstance(fp8, BlockScaledMatmuls):
        left, right = by_sample(left, x)
    elif left.itemsize > 1:
        fp8 = None
    elif fp8 is not None and x.itemsize > 1:
        right = fp8.input(right, rows=False).columns
    if use.store is None or use.store.sums is None:
        return left @ right if fp8 is None else fp8.weight_gradient(left, right, use.weight.dtype)
    use.store.sums.add(use.weight, left, right, fp8)
    return None


def _bias_gradient(use: Use, rows: Tensor) -> Tensor | None:
    if use.bias is None or not use.bias.requires_grad:
        return None
    if use.store is None or use.store.sums is None:
        return rows.sum(0, dtype=use.bias.dtype)
    use.store.sums.add_rows(use.bias, rows)
    return None


class MatmulNode(Function):
    """Graph node of a matmul; a subclass computes its value and gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, use: Use, value: Any, cast: Operands | None, *parameters: Any) -> Any:
        """Return `value(x, use)`; `parameters`: weight and bias if autograd gets their gradients, else nothing."""
        # `cast`: x in fp8, whose columns the backward pass needs instead of x
        ctx.save_for_backward(x if cast is None else cast.columns, use.weight)
        # recompute turns saved tensors into copies, but gradients are for the parameter itself
        ctx.use = use
        output = value(x if cast is None else cast.rows.view(x.shape), use)
        return output if use.heads is None else split_projections(output, *use.heads)


class LocalMatmul(MatmulNode):
    """Matmul on one rank."""

    @staticmethod
    def value(x: Tensor, use: Use) -> Tensor:
        """Return the output for x."""
        rows = x.flatten(0, -2)  # see `_of_rows`
        linear = F.linear(rows, use.weight, use.bias) if use.fp8 is None else use.fp8.linear(use.weight, use.bias)(rows)
        return linear.view(*x.shape[:-1], linear.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx, and last dW and db unless the store takes them."""
        x, weight = ctx.saved_tensors
        use = ctx.use
        grad = grads[0].contiguous() if use.heads is None else stack_projections(grads, use.fp8 is None)
        rows = sums = grad.flatten(0, -2)
        if use.fp8 is None:
            grad_x, left = torch.mm(rows, weight), rows.t()
        else:
            rows, left, sums = _gradients(use, rows)
            grad_x = use.fp8.input_gradient(weight)(rows)
        grad_x = grad_x.view(*grad.shape[:-1], -1)
        if use.store is not None and use.store.is_open:
            _store(use, x, ALONE, left, sums)
            return grad_x, None, None, None, None, None
        grad_weight = _weight_gradient(use, left, x) if use.weight.requires_grad else None
        return grad_x, None, None, None, grad_weight, _bias_gradient(use, sums)


class ColumnParallelMatmul(MatmulNode):
    """Column-parallel matmul."""

    @staticmethod
    def value(x: Tensor, use: Use) -> Tensor:
        """Return the output for x."""
        multiply = _linear(use.fp8, use.weight, use.bias)
        return _in_order(_gather_and_multiply(x, multiply, use.region)[1], use.region)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx, and last dW and db unless the store takes them."""
        x, weight = ctx.saved_tensors
        use = ctx.use
        grad = grads[0].contiguous() if use.heads is None else stack_projections(grads, use.fp8 is None)
        is_open = use.store is not None and use.store.is_open
        whole_x = start_gather(x, use.region) if use.weight.requires_grad and not is_open else None
        grad, left, rows = _gradients(use, grad)
        sums = _multiply_and_sum(grad, _transposed(use.fp8, weight), use.region)
        if is_open:
            _store(use, x, use.region, left, rows)
            return _finish(sums), None, None, None, None, None
        grad_weight = None if whole_x is None else _weight_gradient(use, left, whole_x())
        return _finish(sums), None, None, None, grad_weight, _bias_gradient(use, rows)


class RowParallelMatmul(MatmulNode):
    """Row-parallel matmul."""

    @staticmethod
    def value(x: Tensor, use: Use) -> Tensor:
        """Return the output for x."""
        total = _finish(_multiply_and_sum(x, _linear(use.fp8, use.weight), use.region))
        return total if use.bias is None else total.add_(use.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx, and last dW and db unless the store takes them."""
        x, weight = ctx.saved_tensors
        use, grad = ctx.use, grads[0].contiguous()
        lefts: list[Tensor] = []
        transposed = _transposed(use.fp8, weight)

        def multiply(rows: Tensor) -> Tensor:
            rows, left, _ = _gradients(use, rows)
            lefts.append(left)
            return transposed(rows)

        wholes, values = _gather_and_multiply(grad, multiply, use.region)
        grad_x = _in_order(values, use.region)
        left = _in_order(wholes, use.region).flatten(0, -2).t() if lefts[0].itemsize > 1 else _joined(lefts, use.region)
        sums = grad.flatten(0, -2)
        if use.store is not None and use.store.is_open:
            _store(use, x, ALONE, left, sums)
            return grad_x, None, None, None, None, None
        grad_weight = _weight_gradient(use, left, x) if use.weight.requires_grad else None
        return grad_x, None, None, None, grad_weight, _bias_gradient(use, sums)


def _joined(columns: Sequence[Tensor], region: TensorRegion) -> Tensor:
    """Return the transposes [width, rows] of chunks as one, in the order of the sequence (see `_in_order`)."""
    if len(columns) == 1:
        return columns[0]
    return torch.cat([chunk.unflatten(1, (region.num_slices, -1)) for chunk in columns], dim=2).flatten(1)


def _node(kind: Any, x: Tensor, use: Use) -> Tensor:
    x = x.contiguous()  # or both passes would copy it
    cast, fp8, gathers = None, use.fp8, kind is ColumnParallelMatmul and use.region.slices_sequence
    if fp8 is not None and fp8.casts_once and use.weight.requires_grad and not gathers and not is_discarded(x):
        # saved in place of x, which is twice as large unless the backward pass gathers or recomputes it
        cast = fp8.input(x.flatten(0, -2))
    end_recompute(x, use.weight, None if cast is None else cast.columns)
    parameters = () if leaves_no_gradient(x, use.store) else (use.weight, use.bias)
    return kind.apply(x, use, kind.value, cast, *parameters)


def leaves_no_gradient(x: Tensor, store: Store) -> bool:
    """Return whether a matmul with x leaves its weight out of autograd's graph, adding to the weight's sum itself."""
    # torch would call the hooks of a weight that gets no gradient in another thread; without an edge, not at all
    return store is not None and store.sums is not None and x.requires_grad


def _store(use: Use, x: Tensor, region: TensorRegion, left: Tensor, rows: Tensor) -> None:
    assert use.store is not None
    use.store.put(use.weight, x, region, partial(_weight_gradient, use, left))
    if use.bias is not None:
        use.store.put(use.bias, rows, ALONE, partial(_bias_gradient, use))


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, store: WeightGradientStore, completes: bool) -> Tensor:
        ctx.table, ctx.store, ctx.completes = table, store, completes
        ctx.save_for_backward(ids)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors

        def gradient(grad: Tensor) -> Tensor | None:
            if ctx.store.sums is not None:
                return ctx.store.sums.add_lookup(ctx.table, ids, grad, ctx.completes)
            return torch.ops.aten.embedding_dense_backward(grad, ids, ctx.table.shape[0], -1, False)

        if ctx.store.is_open:
            ctx.store.put(ctx.table, grads[0], ALONE, gradient)
            return None, None, None, None
        return None, gradient(grads[0]), None, None
