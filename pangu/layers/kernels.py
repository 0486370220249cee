"""The attention kernels."""

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
    query: Tensor
    """[batch, heads, sequence, head size]."""
    key: Tensor
    """The same, or fewer heads, each for a group of neighbouring query heads (Ainslie et al. 2023), or a longer
    sequence, which ends with the queries; `value` likewise."""
    value: Tensor

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    def ungrouped(self) -> QKV:
        """With keys and values repeated for every query head."""
        repeats = self.query.shape[1] // self.key.shape[1]
        if repeats == 1:
            return self
        return QKV(self.query, *(x.repeat_interleave(repeats, dim=1) for x in (self.key, self.value)))


@dataclass(frozen=True)
class MaskAndBias:
    mask: AttentionMask
    bias: Bias | None
    length: int
    """Number of keys."""
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    """Position of the first query; the keys before it come from a KV cache."""

    def dense_mask(self) -> Tensor:
        """bool [batch or 1, 1, queries, sequence], true where the query sees the key."""
        return self.mask.dense(self.length, self.device, self.first)

    def dense_bias(self, dtype: torch.dtype) -> Tensor:
        """[batch or 1, heads / ranks or 1, queries, sequence]: the bias, -inf where the mask forbids."""
        bias = torch.zeros((), device=self.device) if self.bias is None else self.bias.dense(self.first)
        return torch.where(self.dense_mask(), bias.to(dtype), -math.inf)


class Kernel(Protocol):
    """softmax(q kᵀ / sqrt(head size) + bias) v over the keys that the mask allows. Made for one forward over a
    micro-batch, called by every layer."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute what all layers share."""

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [the shape of `query`] and the scores before bias and mask; None from a kernel that never stores
        them. `keys` None: no dropout. `below`: scores [batch, heads, queries, keys] of the layer below, which are
        added; only a kernel with the ability `scores` gets any."""


class Reference:
    """Explicit scores and a softmax in fp32 (fp64 in fp64)."""

    def __init__(self, terms: MaskAndBias) -> None:
        self.bias = terms.dense_bias(torch.promote_types(terms.dtype, torch.float32))

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = qkv.ungrouped()
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]))
        if below is not None:
            scores = scores + below
        probabilities = (scores + self.bias).softmax(-1).to(query.dtype)
        return dropout.probabilities(probabilities, keys) @ value, scores


class Sdpa:
    """torch's scaled_dot_product_attention."""

    def __init__(self, terms: MaskAndBias) -> None:
        self.mask: Tensor | None = None
        if terms.bias is not None:
            self.mask = terms.dense_bias(terms.dtype)
        elif terms.first or not terms.mask.is_plain_causal:
            self.mask = terms.dense_mask()

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        # with a mask, no fused kernel reads grouped heads as they are
        parts = qkv if self.mask is None else qkv.ungrouped()
        output = F.scaled_dot_product_attention(
            *parts,
            attn_mask=self.mask,
            dropout_p=dropout.in_kernel(keys),
            is_causal=self.mask is None,
            enable_gqa=parts.is_grouped,
        )
        return output, None


KERNELS: dict[str, type[Kernel]] = {"reference": Reference, "sdpa": Sdpa}


def kernel_named(name: str) -> type[Kernel]:
    """By a value of `model.attention`; `pangu.config.attention` says what each can do."""
    if name in KERNELS:
        return KERNELS[name]
    from pangu.layers.gpu_kernels import GPU_KERNELS

    return GPU_KERNELS[name]


def densely_masked(kernel: type[Kernel]) -> type[Kernel]:
    """The kernel for queries whose keys lie in a cache, and for documents whose bounds nobody knows: `sdpa` in place of
    one that needs bounds, or as many queries as keys."""
    return kernel if kernel is Reference else Sdpa
