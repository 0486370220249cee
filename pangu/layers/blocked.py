"""Attention for CPUs whose backward pass works through blocks of queries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

BLOCK = 128
"""Queries of a block."""
SCORES_BYTES = 2 << 20
"""Of scores that are worked on at a time: about a core's cache."""


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, *, causal: bool, fused_forward: bool
) -> Tensor:
    """softmax(q kᵀ / sqrt(head size)) v over the keys at or before a query that are not forbidden.

    Only queries, keys and values are kept. Backward has the probabilities of one block of queries of a few heads at a
    time and leaves out the keys behind the block.

    Args:
        query: [batch, heads, sequence, head size].
        key: the same.
        value: the same.
        forbidden: bool [batch or 1, 1, sequence, sequence], true where row (query) must not see column (key).
        causal: only keys behind the query are forbidden.
        fused_forward: forward is torch's fused kernel; otherwise it works through blocks too.

    Returns:
        The shape of `query`, and its order in memory.
    """
    return _Blocked.apply(query, key, value, forbidden, causal, fused_forward)


class _Blocked(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, causal: bool, fused: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        # not by save_for_backward: it is one tensor for all layers
        ctx.forbidden, ctx.causal = forbidden, causal
        if fused:
            mask = None if causal else ~forbidden
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        parts = []
        for heads in _groups(query):
            flat_query, flat_key, flat_value = _some(heads, query, key, value)
            blocks = _blocks(flat_query * _scale(query), flat_key, _masks(forbidden, heads, query), causal)
            parts.append(torch.cat([p @ flat_value[:, :stop] for _, stop, p in blocks][::-1], dim=1))
        return torch.empty_like(query).copy_(torch.cat(parts).unflatten(0, query.shape[:2]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        results = [query.new_empty(query.shape) for _ in range(3)]
        for heads in _groups(query):
            q, k, v, grad = _some(heads, query, key, value, grads[0])
            found = _gradients(q, k, v, grad, _masks(ctx.forbidden, heads, query), ctx.causal)
            for result, part in zip(results, found, strict=True):
                result.flatten(0, 1)[heads] = part
        return (*results, None, None, None)


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, masks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of some heads; all [heads, sequence, head size]."""
    scaled = query * _scale(query)
    # blocks come last first, so that the first one to come fills all rows of these two
    grad_query, grad_key, grad_value = torch.empty_like(query), None, None
    for rows, stop, probabilities in _blocks(scaled, key, masks, causal):
        own = grad[:, rows]
        of_values = probabilities.mT @ own
        of_probabilities = own @ value[:, :stop].mT
        of_scores = torch.ops.aten._softmax_backward_data(of_probabilities, probabilities, -1, query.dtype)
        grad_query[:, rows] = of_scores @ key[:, :stop]
        of_keys = of_scores.mT @ scaled[:, rows]
        if grad_key is None or grad_value is None:
            grad_key, grad_value = of_keys, of_values
        else:
            grad_key[:, :stop] += of_keys
            grad_value[:, :stop] += of_values
    assert grad_key is not None
    assert grad_value is not None
    return grad_query.mul_(_scale(query)), grad_key, grad_value


def _scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _groups(query: Tensor) -> Iterator[slice]:
    """Heads, of all that a batch has, whose scores are worked on together."""
    batch, heads, length, _ = query.shape
    size = max(torch.get_num_threads(), SCORES_BYTES // (min(BLOCK, length) * length * query.element_size()))
    for start in range(0, batch * heads, size):
        yield slice(start, min(start + size, batch * heads))


def _some(heads: slice, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[batch, heads, sequence, head size] -> [those heads, sequence, head size]."""
    return tuple(x.flatten(0, 1)[heads].contiguous() for x in tensors)


def _masks(forbidden: Tensor, heads: slice, query: Tensor) -> Tensor:
    """A view [those heads or 1, sequence, sequence] of `forbidden`, as long as all samples have one mask."""
    if len(forbidden) == 1:
        return forbidden[0]
    return forbidden[torch.arange(heads.start, heads.stop) // query.shape[1], 0]


def _blocks(query: Tensor, key: Tensor, masks: Tensor, causal: bool) -> Iterator[tuple[slice, int, Tensor]]:
    """For blocks of queries, the last one first: its rows, the number of keys that it can see, and the probabilities
    [heads, block, keys].

    Args:
        query: [heads, sequence, head size], scaled.
        key: [heads, sequence, head size].
        masks: bool [heads or 1, sequence, sequence], as `forbidden` of `blocked_attention`.
        causal: as in `blocked_attention`.
    """
    length = query.shape[1]
    for start in reversed(range(0, length, BLOCK)):
        stop = min(start + BLOCK, length)
        scores = query[:, start:stop] @ key[:, :stop].mT
        # a causal mask allows all keys before the block
        first = start if causal else 0
        scores[..., first:].masked_fill_(masks[:, start:stop, first:stop], -math.inf)
        yield slice(start, stop), stop, scores.softmax(-1)
