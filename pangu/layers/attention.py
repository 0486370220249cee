"""Multi-head attention (Vaswani et al. 2017, section 3.2) with causal and document masks, and its kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.recompute import checkpointed


class AttentionMask:
    """Which keys each query may see: those at or before it and, where documents are given, in its own document."""

    def __init__(self, documents: Tensor | None, valid: Tensor | None = None) -> None:
        """
        Args:
            documents: int64 [batch, sequence], number of the document that each token belongs to; None: all one.
            valid: bool [batch, sequence], false where a token is padding that nobody may see; None: all valid.
        """
        self._documents = documents
        self._valid = valid
        self._allowed: Tensor | None = None

    @property
    def is_plain_causal(self) -> bool:
        """True if nothing but the order of tokens decides."""
        return self._documents is None and self._valid is None

    def allowed(self, length: int, device: torch.device) -> Tensor:
        """bool [batch or 1, 1, sequence, sequence], true where row (query) sees column (key); made once."""
        if self._allowed is None:
            allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
            if self._documents is not None:
                allowed = allowed & (self._documents[:, None, :, None] == self._documents[:, None, None, :])
            if self._valid is not None:
                # a padding token still sees itself: a row without any key would have no softmax
                itself = torch.eye(length, dtype=torch.bool, device=device)
                allowed = allowed & (self._valid[:, None, None, :] | itself)
            self._allowed = allowed
        return self._allowed


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype, dropout_probability: float) -> str:
    """The kernel that `auto` stands for; any other request is returned as it is.

    On a CPU, torch's fused kernel cannot drop probabilities. It is the faster one in fp32 and fp64 and, with matrix
    tiles (AMX), in 16-bit formats; without tiles explicit scores are 2 to 3 times faster in those.
    """
    if requested != "auto":
        return requested
    if device.type == "cpu":
        slow = dtype.itemsize == 2 and not torch.cpu._is_amx_tile_supported()
        if slow or dropout_probability > 0:
            return "reference"
    return "sdpa"


class AttentionCore(nn.Module):
    """softmax(q kᵀ / sqrt(head size)) v, by the kernel chosen at construction. Has no parameters.

    Heads are independent, so a tensor-parallel rank computes its own ones and nothing is communicated.
    """

    def __init__(self, build: Builder, kernel: str, dropout_probability: float, recompute: bool = False) -> None:
        """
        Args:
            build: stands at the attention layer.
            kernel: `reference` or `sdpa`.
            dropout_probability: of dropping a probability.
            recompute: keep queries, keys and values only and compute the rest again in backward (Korthikanti et al.
                2022, section 5).
        """
        super().__init__()
        self.recompute = recompute
        self.kernel = {"reference": self._reference, "sdpa": self._sdpa}[kernel]
        shared = 1 if build.region.size > 1 else None
        self.dropout = Dropout(build, dropout_probability, "probabilities", batch_dim=0, shared_dim=shared)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, keys: DropoutKeys | None
    ) -> Tensor:
        """query: [batch, heads, sequence, head size]; returns the same shape.

        key, value: the same, or fewer heads, each for a group of neighbouring query heads (Ainslie et al. 2023).
        """
        return checkpointed(self.kernel, query, key, value, mask, keys, on=self.recompute)

    def _reference(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, keys: DropoutKeys | None
    ) -> Tensor:
        key, value = for_every_head(key, query), for_every_head(value, query)
        scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]))
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        wide = wide.masked_fill(~mask.allowed(query.shape[-2], query.device), -math.inf)
        probabilities = wide.softmax(-1).to(query.dtype)
        return self.dropout(probabilities, keys) @ value

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, keys: DropoutKeys | None) -> Tensor:
        probability = self.dropout.probability if keys is not None else 0.0
        if keys is not None and probability > 0.0:
            keys.seed_kernel(f"{self.dropout.place}, rank {self.dropout.region.rank}")
        if mask.is_plain_causal:
            return F.scaled_dot_product_attention(
                query, key, value, dropout_p=probability, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
            )
        # with a mask, no fused kernel reads grouped heads as they are
        key, value = for_every_head(key, query), for_every_head(value, query)
        allowed = mask.allowed(query.shape[-2], query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=probability)


def for_every_head(grouped: Tensor, query: Tensor) -> Tensor:
    """Key or value heads [batch, groups, sequence, size], repeated so that every query head has its own."""
    repeats = query.shape[1] // grouped.shape[1]
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=1)


def split_heads(x: Tensor, size: int) -> Tensor:
    """[sequence, batch, heads x size] -> [batch, heads, sequence, size]; a head is a contiguous slice of the width."""
    return x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, sequence, size] -> [sequence, batch, heads x size]."""
    return x.permute(2, 0, 1, 3).flatten(2)
