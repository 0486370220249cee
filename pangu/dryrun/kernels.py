"""Replacements for attention kernels on fake tensors, with the same memory and the same matmuls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.layers import gpu_kernels
from pangu.layers.attention_blocks import Lengths
from pangu.layers.dropping_attention import Masked
from pangu.layers.kernels import QKV

_flash = torch.ops.aten._scaled_dot_product_flash_attention
"""Kernel of queries, keys, values [batch, heads, sequence, size], dropout and causality; output, log-sum-exp first."""


def _flash_backward(
    grad: Tensor, qkv: Sequence[Tensor], output: Tensor, log_sum: Tensor, state: Tensor, dropout: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = qkv[0].shape[2], qkv[1].shape[2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, *qkv, output, log_sum, state, state, *lengths, dropout, causal, state, state
    )


def _rows(part: Tensor, length: int) -> Tensor:
    """Return packed rows as [batch, heads, sequence, size]."""
    return part.reshape(-1, length, *part.shape[-2:]).transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by the kernel that torch uses on a device; for fake tensors it would store all scores."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256:
        return _flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # torch converts it in every layer, too
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, longest: int, left: int, dropout: float
) -> Tensor:
    """Return attention over full rows: an upper bound on the cost, since document lengths are unknown."""
    rows = (_rows(part, longest) for part in (query, key, value))
    return _flash(*rows, dropout, True)[0].transpose(1, 2).view(query.shape)


def flash_forward(
    qkv: Sequence[Tensor], lengths: Lengths, dropout: float, options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Return the forward pass of `flash_attention`; scores outside of a sliding window are counted as well."""
    rows = [_rows(part, length) for part, length in zip(qkv, (lengths[2], *[lengths[3]] * 2), strict=True)]
    output, log_sum, *_ = _flash(*rows, dropout, options["is_causal"] or "window_size_left" in options)
    if lengths.queries is not None:
        log_sum = log_sum.transpose(0, 1).flatten(1)
    state = qkv[0].new_empty(2, dtype=torch.int64)
    return output.transpose(1, 2).view(qkv[0].shape), log_sum, state, state


def flash_backward(
    tensors: Sequence[Tensor], lengths: Lengths, dropout: float, state: Sequence[Tensor], options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Return the gradients of `flash_forward`."""
    sizes = (lengths[2], lengths[2], lengths[3], lengths[3], lengths[2])
    grad, *qkv, output = (_rows(part, size) for part, size in zip(tensors[:5], sizes, strict=True))
    log_sum = tensors[5].view(qkv[0].shape[1], -1, lengths[2]).transpose(0, 1)
    causal = options["is_causal"] or "window_size_left" in options
    gradients = _flash_backward(grad, qkv, output, log_sum, state[0], dropout, causal)
    return tuple(one.transpose(1, 2).reshape(part.shape) for one, part in zip(gradients, tensors[1:4], strict=True))


def attend(query: Tensor, key: Tensor, value: Tensor, masked: Masked) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of `flash_attention` for sequences split over ranks."""
    output, log_sum, *_ = _flash(query, key, value, 0.0, masked.key_at + key.shape[2] > masked.query_at)
    return output, log_sum


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, masked: Masked
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; both backward kernels recompute the scores and the gradients of the probabilities."""
    attend(query, key, value, masked)
    state, causal = query.new_empty(2, dtype=torch.int64), masked.key_at + key.shape[2] > masked.query_at
    return _flash_backward(grad, (query, key, value), output, log_sum, state, 0.0, causal)


class _Sums(Function):
    """Log-sum-exp of the softmax for FlexAttention: attends to few value columns and keeps the result."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        sums = _flash(*qkv, 0.0, True)[1]
        ctx.save_for_backward(*qkv, qkv[0].new_empty(*qkv[0].shape[:-1], qkv[2].shape[-1]), sums)
        return sums.to(qkv[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, output, sums = ctx.saved_tensors
        state = output.new_empty(2, dtype=torch.int64)
        return (*_flash_backward(output, qkv, output, sums, state, 0.0, True)[:2], None)


def flex(qkv: QKV, score_mod: object, blocks: object, rows: Tensor | None, dropout: float) -> Tensor:
    """Return FlexAttention's output with the same memory and matmuls; the audit knows how many blocks are computed."""
    output = _flash(*qkv, 0.0, True)[0]
    if rows is None:
        return output
    return output * _Sums.apply(qkv.query, qkv.key, qkv.value[..., : gpu_kernels.FEWEST_COLUMNS].detach())[..., None]
