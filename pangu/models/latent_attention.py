"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads from one short vector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.model import ModelConfig
from pangu.layers.attention import AttentionCore, merge_heads, split_heads
from pangu.layers.builder import Builder
from pangu.layers.kernels import QKV, Reference
from pangu.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, make_norm
from pangu.layers.rotary import attention_scale

if TYPE_CHECKING:
    from pangu.models.block import ForwardContext, Options


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of a latent vector per token, which is all that generation keeps.

        latent = norm(x Dᵀ)          key of a head = [latent Kᵀ; rotated shared key]      value = latent Vᵀ

    Queries come from a latent vector of their own, or from x. Only their last `rope_head_dim` elements rotate, and so
    does the key x Rᵀ that all heads share. Every tensor-parallel rank computes the latent vectors, and then its heads.
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options, number: int) -> None:
        """Build the projections and norms of layer `number`; there is no query layer."""
        super().__init__()
        assert config.latent is not None
        assert number != config.query_layer
        self.sinks = build.optional("sinks")
        self.has_window = config.has_window(number)
        self.latent, self.head_size = config.latent, config.head_size
        self.down = ReplicatedLinear(build, "down")
        eps = config.norm_eps if config.latent.norm_eps is None else config.latent.norm_eps
        self.query_norm: nn.Module | None = None
        if config.latent.q_rank is not None:
            self.query_norm = make_norm(build, "query_norm", eps, config.norm)
        self.kv_norm = make_norm(build, "kv_norm", eps, config.norm)
        self.query = ColumnParallelLinear(build, "query")
        self.key_value = ColumnParallelLinear(build, "key_value")
        self.output = RowParallelLinear(build, "output")
        self.scale = attention_scale(config.rope_scaling)
        recompute = "attention" in options.recompute_parts and build.context is None
        self.core = AttentionCore(build, config.attention_dropout, recompute, config.residual_scores)
        self.logits = None if build.logits is None else build.logits.of_layer(number, build)

    def project(self, x: Tensor, context: ForwardContext, queries: Tensor | None) -> QKV:
        """Return queries, keys and values of x [sequence, batch, hidden], one key head for all if they are cached."""
        *down, latent, key_rope = self.down(x).split_with_sizes(self.down.widths, -1)
        latent = self.kv_norm(latent)
        # one head [batch, 1, sequence, rope_head_dim]
        key_rope = self._rotated(split_heads(self.down.enter(key_rope), key_rope.shape[-1]), context)
        query = split_heads(self.query(x if self.query_norm is None else self.query_norm(*down)), self.head_size)
        query_nope, query_rope = query.split_with_sizes([self.latent.nope_head_dim, self.latent.rope_head_dim], -1)
        query_rope = self._rotated(query_rope, context)
        if self.scale != 1:
            query_nope, query_rope = query_nope * self.scale, query_rope * self.scale
        if context.cache is not None:
            whole = split_heads(self.down.enter(latent), latent.shape[-1])
            (kept,) = context.cache.append(self, context.first, torch.cat([whole, key_rope], -1))
            if context.first:
                return self._absorbed(query_nope, query_rope, kept)
        return self._expanded(torch.cat([query_nope, query_rope], -1), latent, key_rope, context)

    def finish(self, attended: Tensor, context: ForwardContext) -> Tensor:
        """Return the output [sequence, batch, hidden] for attention [batch, heads / ranks, sequence, head size]."""
        if context.cache is not None and context.first:
            _, values = self.key_value.weight.split_with_sizes(self.key_value.widths)
            values = values.unflatten(0, (attended.shape[1], -1))
            attended = torch.einsum("bhsr,hvr->bhsv", attended[..., : self.latent.kv_rank], values)
        return cast(Tensor, self.output(merge_heads(attended[..., : self.latent.value_head_dim])))

    def _rotated(self, x: Tensor, context: ForwardContext) -> Tensor:
        assert context.rotary is not None
        return context.rotary(x)

    def _expanded(self, query: Tensor, latent: Tensor, key_rope: Tensor, context: ForwardContext) -> QKV:
        """Return the keys and values of every head."""
        parts = self.key_value(latent).split_with_sizes(self.key_value.widths, -1)
        key, value = map(split_heads, parts, (self.latent.nope_head_dim, self.latent.value_head_dim))
        key = torch.cat([key, key_rope.expand(-1, key.shape[1], -1, -1)], -1)
        # the explicit kernel alone takes values of another size than keys
        kernel = context.kernels[int(self.has_window)]
        narrow = 0 if isinstance(kernel, Reference) else self.head_size - value.shape[-1]
        return QKV(query, key, F.pad(value, (0, narrow)))

    def _absorbed(self, query_nope: Tensor, query_rope: Tensor, kept: Tensor) -> QKV:
        """Return the cached vectors `kept` as the key head of all: q (K c) = (q K) c, and V follows the sum."""
        keys, _ = self.key_value.weight.split_with_sizes(self.key_value.widths)
        absorbed = torch.einsum("bhsn,hnr->bhsr", query_nope, keys.unflatten(0, (query_nope.shape[1], -1)))
        # kernels divide by the square root of the width that they see
        query = torch.cat([absorbed, query_rope], -1) * math.sqrt(kept.shape[-1] / self.head_size)
        return QKV(query, kept, kept)
