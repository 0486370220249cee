"""The Transformer layer that GPT and PanGu-α share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.layers.attention import AttentionCore, KVCache, merge_heads, split_heads
from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.kernels import QKV, Kernel
from pangu.layers.linear import ColumnParallelLinear, RowParallelLinear, make_norm
from pangu.layers.recompute import SavedTensors, checkpointed

if TYPE_CHECKING:
    from pangu.layers.experts import Routes


@dataclass(frozen=True)
class Options:
    """How a model is computed; none of it changes what it computes."""

    kernel: str = "reference"
    recompute: int | None = 0
    """Number of layers, from the first on, that backward recomputes; None: all."""
    recompute_parts: tuple[str, ...] = ()
    """Parts of every layer that are recomputed: `attention` (scores, probabilities and their dropout), `activation`
    (the output of the feed-forward layer's non-linearity) and `norm` (the outputs of norms that a matrix takes in)."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; None: all."""
    offload: bool = False

    @classmethod
    def of(cls, config: RunConfig, kernel: str) -> Options:
        memory = config.memory
        offload = "activations" in memory.offload
        return cls(kernel, memory.recomputed_layers, memory.recomputed_parts, config.loss_chunk, offload)


@dataclass(frozen=True)
class ForwardContext:
    """What all layers share in one forward over a micro-batch."""

    kernel: Kernel
    """The attention kernel, with mask and bias of this micro-batch."""
    positions: Tensor
    """int64 [batch, sequence], position of each token in its document."""
    keys: DropoutKeys | None
    """Keys of the dropout masks; None in evaluation."""
    saved: SavedTensors
    rotary: Callable[[Tensor], Tensor] | None = None
    cache: KVCache | None = None
    """None if a forward has all tokens."""
    first: int = 0
    """Number of cached tokens before these."""
    routes: Routes | None = None
    """What routers of experts decided, which a recompute takes again; None: there are none."""


class HiddenStates(NamedTuple):
    hidden: Tensor
    """[sequence (/ ranks with sequence parallelism), batch, hidden]."""
    scores: Tensor | None = None
    """[batch, heads / ranks, queries, keys], attention scores that the next layer adds before bias and mask (He et al.
    2021, section 3); None in the first layer, and without `model.residual_scores`."""


def _gelu_tanh(x: Tensor) -> Tensor:
    """Torch's kernel; for a compiler, which makes one loop of it, by (1 + tanh u) / 2 = sigmoid(2u): a CPU
    takes less time for the exponential function than for tanh."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


def _swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half times the second (Shazeer 2020, equation 6)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "fast_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": _swiglu,
}
"""GELU with its tanh and sigmoid approximations (Hendrycks & Gimpel 2016, section 2) and the gated SwiGLU."""


class Attention(nn.Module):
    """Projections, norms of the heads, rotary embedding, kernel, output matmul. In PanGu-α's query layer (report,
    section 2.2.2) the queries come from position vectors."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options, query_layer: bool) -> None:
        super().__init__()
        self.head_size = config.head_size
        if query_layer:
            self.query = ColumnParallelLinear(build, "query", from_table=True)
            self.key_value = ColumnParallelLinear(build, "key_value")
        else:
            self.qkv = ColumnParallelLinear(build, "qkv")
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm:
            self.query_norm = make_norm(build, "query_norm", config.norm_eps, config.norm, of_heads=True)
            self.key_norm = make_norm(build, "key_norm", config.norm_eps, config.norm, of_heads=True)
        self.output = RowParallelLinear(build, "output")
        recompute = "attention" in options.recompute_parts and build.context is None
        self.core = AttentionCore(build, config.attention_dropout, recompute, config.residual_scores)

    def forward(self, x: Tensor, context: ForwardContext, below: Tensor | None, queries: Tensor | None) -> HiddenStates:
        """x: [sequence, batch, hidden]; below: scores of the layer below; queries: position vectors (of all positions)
        [sequence, batch, hidden], for the query layer."""
        if queries is None:
            projected = self.qkv(x).split(self.qkv.widths, dim=-1)
        else:
            projected = (self.query(queries), *self.key_value(x).split(self.key_value.widths, dim=-1))
        query, key, value = (split_heads(part, self.head_size) for part in projected)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None:
            query, key = context.rotary(query), context.rotary(key)
        qkv = QKV(query, key, value)
        if context.cache is not None:
            qkv = context.cache.append(self, qkv, context.first)
        attended, scores = self.core(qkv, context.kernel, context.keys, below)
        return HiddenStates(self.output(merge_heads(attended)), scores)


class FeedForward(nn.Module):
    """A dense one, which knows no `routes`."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        super().__init__()
        self.recompute = "activation" in options.recompute_parts
        self.up = ColumnParallelLinear(build, "up")
        self.down = RowParallelLinear(build, "down")
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, routes: Routes | None) -> Tensor:
        return checkpointed(lambda inner: self.down(self.activation(inner)), self.up(x), on=self.recompute)


def _feed_forward(config: ModelConfig, build: Builder, options: Options, number: int) -> nn.Module:
    if not config.has_experts(number):
        return FeedForward(config, build, options)
    from pangu.layers.experts import MixtureOfExperts

    shared = FeedForward(config, build.at("shared"), options) if config.shared_experts else None
    recompute = "activation" in options.recompute_parts
    return MixtureOfExperts(config, build, number, ACTIVATIONS[config.activation], recompute, shared)


class Block(nn.Module):
    """Pre-norm (Radford et al. 2019): x + Attention(LN(x)), then x + FFN(LN(x)). Post-norm (Vaswani et al. 2017):
    LN(x + Attention(x)), then LN(x + FFN(x)).

    In PanGu-α's query layer the queries are position vectors, neither normed nor dropped; the residual stream is still
    the layer's input (PanGu-α's released code). Position bias, mask and residual scores are those of the other layers
    (ours: the released models have none of the three options).
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options, number: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(build, "attention_norm", config.norm_eps, config.norm)
        self.attention = Attention(config, build.at("attention"), options, number == config.query_layer)
        self.mlp_norm = make_norm(build, "mlp_norm", config.norm_eps, config.norm)
        self.mlp = _feed_forward(config, build.at("mlp"), options, number)
        self.attention_dropout = Dropout(build, config.dropout, "attention_output")
        self.mlp_dropout = Dropout(build, config.dropout, "mlp_output")
        self.post_norm, self.recompute_norm = config.norm_placement == "post", "norm" in options.recompute_parts

    def forward(self, below: HiddenStates, context: ForwardContext, queries: Tensor | None) -> HiddenStates:
        x, scores = below
        if self.post_norm:
            attended, scores = self.attention(x, context, scores, queries)
            x = self.attention_dropout.hidden(attended, context.keys, x)
            # the other norm's output is the layer's, which full recompute keeps as well
            with context.saved.discarding(self.attention_norm, x, self.recompute_norm) as normed:
                change = self.mlp(normed, context.routes)
            return HiddenStates(self.mlp_norm(self.mlp_dropout.hidden(change, context.keys, normed)), scores)
        with context.saved.discarding(self.attention_norm, x, self.recompute_norm) as normed:
            attended, scores = self.attention(normed, context, scores, queries)
        x = self.attention_dropout.hidden(attended, context.keys, x)
        with context.saved.discarding(self.mlp_norm, x, self.recompute_norm) as normed:
            change = self.mlp(normed, context.routes)
        return HiddenStates(self.mlp_dropout.hidden(change, context.keys, x), scores)
