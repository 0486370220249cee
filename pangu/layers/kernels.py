"""Attention kernels that run everywhere, and their interface."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.masks import AttentionMask

if TYPE_CHECKING:
    from pangu.layers.biases import Bias


class QKV(NamedTuple):
    """Queries, keys and values of attention."""

    query: Tensor
    """Queries [batch, heads, sequence, head size]."""
    key: Tensor
    """Keys and values as `query`, or with fewer heads (Ainslie et al. 2023), or for more tokens up to the queries."""
    value: Tensor

    @property
    def is_grouped(self) -> bool:
        """True if several query heads share a key head."""
        return self.query.shape[1] != self.key.shape[1]

    def ungrouped(self) -> QKV:
        """Return queries, keys and values with the latter two repeated for every query head."""
        repeats = self.query.shape[1] // self.key.shape[1]
        if repeats == 1:
            return self
        return QKV(self.query, *(x.repeat_interleave(repeats, dim=1) for x in (self.key, self.value)))


@dataclass(frozen=True)
class MaskAndBias:
    """Mask and position bias of one micro-batch."""

    mask: AttentionMask
    bias: Bias | None
    length: int
    """Number of keys."""
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    """Position of the first query; earlier keys come from a KV cache."""

    def dense_mask(self) -> Tensor:
        """Return bool [batch or 1, 1, queries, sequence], true where the query sees the key."""
        return self.mask.dense(range(self.first, self.length), range(self.length), self.device)

    def dense_bias(self, dtype: torch.dtype) -> Tensor:
        """Return the bias [batch or 1, heads / ranks or 1, queries, sequence], -inf where the mask forbids."""
        bias = torch.zeros((), device=self.device) if self.bias is None else self.bias.dense(self.first)
        return torch.where(self.dense_mask(), bias.to(dtype), -math.inf)


class Kernel(Protocol):
    """Attention kernel, created per micro-batch and called by every layer: softmax(q kᵀ / sqrt(head size) + bias) v."""

    # `keys` of None: no dropout. `below`: scores [batch, heads, queries, keys] of the layer below, to be added; only
    # kernels with the ability `scores` get any. `sinks` [heads / ranks]: scores of one more key each, of value 0.
    def __init__(self, terms: MaskAndBias) -> None:
        """Compute what all layers share."""

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention, shaped as `query`, and the scores before bias and mask (None if never stored)."""


class Reference:
    """Kernel with explicit scores and a softmax in fp32 (fp64 in fp64)."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute the bias with the mask."""
        self.bias = terms.dense_bias(torch.promote_types(terms.dtype, torch.float32))

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention and scores; see `Kernel`."""
        query, key, value = qkv.ungrouped()
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]))
        if below is not None:
            scores = scores + below
        logits = scores + self.bias
        if sinks is not None:
            column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], -1)
        probabilities = logits.softmax(-1)[..., : scores.shape[-1]].to(query.dtype)
        return dropout.probabilities(probabilities, keys) @ value, scores


class Sdpa:
    """Kernel that calls torch's scaled_dot_product_attention."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute the mask, if it is not causal only."""
        self.mask: Tensor | None = None
        if terms.bias is not None:
            self.mask = terms.dense_bias(terms.dtype)
        elif terms.first or not terms.mask.is_plain_causal:
            self.mask = terms.dense_mask()

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention; see `Kernel`."""
        shape = qkv.query.shape
        if self.mask is not None and self.mask.shape[1] == shape[2] == 1:
            # decoding: the query heads of a key head are queries with one mask
            qkv = qkv._replace(query=qkv.query.reshape(shape[0], qkv.key.shape[1], -1, shape[3]))
        # with a mask, no fused kernel supports grouped heads
        parts = qkv if self.mask is None else qkv.ungrouped()
        output = F.scaled_dot_product_attention(
            *parts,
            attn_mask=self.mask,
            dropout_p=dropout.in_kernel(keys),
            is_causal=self.mask is None,
            enable_gqa=parts.is_grouped,
        )
        return output.reshape(shape), None


def densely_masked(kernel: type[Kernel], sinks: bool = False) -> type[Kernel]:
    """Return a kernel for cached keys or documents without bounds: `sdpa` if `kernel` cannot handle these."""
    return Reference if sinks or kernel is Reference else Sdpa
