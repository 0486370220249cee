"""The Transformer layer that GPT and PanGu-α share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.layers.attention import AttentionCore, merge_heads, split_heads
from pangu.layers.builder import Builder
from pangu.layers.cache import Cache
from pangu.layers.dropout import DropoutKeys, hidden_dropout
from pangu.layers.kernels import Heads, Kernel
from pangu.layers.linear import ColumnParallelLinear, RowParallelLinear, make_norm
from pangu.layers.recompute import Result, SavedTensors, checkpointed
from pangu.layers.rotary import Rotation


@dataclass(frozen=True)
class Options:
    """How a model is computed; none of it changes what it computes."""

    kernel: str = "reference"
    """Attention kernel, a key of `KERNELS`."""
    recompute: int | None = 0
    """So many layers, from the first on, are computed again in backward, which saves their activations; None: all."""
    recompute_parts: tuple[str, ...] = ()
    """Parts of every layer that are computed again: `attention` (scores, probabilities and their dropout),
    `activation` (the output of the feed-forward layer's non-linearity) and `norm` (the outputs of norms that a matrix
    takes in)."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; None: all."""
    offload: bool = False
    """What the layers save for backward is moved to host memory."""

    @classmethod
    def of(cls, config: RunConfig, kernel: str) -> Options:
        """What a run asks for, with the attention kernel that was chosen for it."""
        memory = config.memory
        offload = "activations" in memory.offload
        return cls(kernel, memory.recomputed_layers, memory.recomputed_parts, config.loss.chunk, offload)


@dataclass(frozen=True)
class Pass:
    """What one pass over a micro-batch carries beside the hidden states."""

    kernel: Kernel
    """Computes attention, with the mask and the bias of this micro-batch."""
    positions: Tensor
    """int64 [batch, sequence], position of each token in its document."""
    keys: DropoutKeys | None
    """Keys of the dropout masks; None in evaluation."""
    saved: SavedTensors
    """What becomes of what the layers save for backward."""
    rotation: Rotation | None = None
    """Turns queries and keys by their positions; None if positions enter otherwise."""
    cache: Cache | None = None
    """Keys and values of the tokens before these and, from now on, of these; None if a pass has all tokens."""
    first: int = 0
    """Tokens before these."""

    def turned(self, heads: Tensor) -> Tensor:
        """Queries or keys [batch, heads, sequence, size], turned if the model does that."""
        return heads if self.rotation is None else self.rotation(heads)

    def with_cached(self, layer: nn.Module, heads: Heads) -> Heads:
        """The queries of these tokens with the keys and values of all tokens so far."""
        return heads if self.cache is None else self.cache.extended(layer, heads, self.first)


class Carried(NamedTuple):
    """All that one layer hands to the next."""

    hidden: Tensor
    """[sequence (/ ranks with sequence parallelism), batch, hidden]."""
    scores: Tensor | None = None
    """[batch, heads / ranks, queries, keys], attention scores to which those of the next layer are added, before
    bias and mask (He et al. 2021, section 3); None in the first layer, and without `model.residual_scores`."""


def _swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half times the second (Shazeer 2020, equation 6)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "fast_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": _swiglu,
}
"""GELU with its tanh and sigmoid approximations (Hendrycks & Gimpel 2016, section 2) and the gated SwiGLU."""


class Attention(nn.Module, ABC):
    """Attention behind its projections: norms of the heads, the turn by position, the kernel, the output product."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        super().__init__()
        self.head_size = config.head_size
        self._make_projections(build)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                make_norm(build, name, config.norm_eps, config.norm, of_heads=True)
                for name in ("query_norm", "key_norm")
            )
        self.output = RowParallelLinear(build, "output")
        again = "attention" in options.recompute_parts
        self.core = AttentionCore(build, config.attention_dropout, again, config.residual_scores)

    @abstractmethod
    def _make_projections(self, build: Builder) -> None:
        """Queries, keys and values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, run: Pass, below: Tensor | None) -> Carried:
        """query, key, value: [sequence, batch, their heads x head size]; below: scores of the layer below, if they are
        passed on."""
        query, key, value = (split_heads(part, self.head_size) for part in (query, key, value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        heads = run.with_cached(self, Heads(run.turned(query), run.turned(key), value))
        context, scores = self.core(heads, run.kernel, run.keys, below)
        return Carried(self.output(merge_heads(context)), scores)


class SelfAttention(Attention):
    """Queries, keys and values all come from the layer's input."""

    def _make_projections(self, build: Builder) -> None:
        self.qkv = ColumnParallelLinear(build, "qkv")

    def forward(self, x: Tensor, run: Pass, below: Tensor | None) -> Carried:
        """x: [sequence, batch, hidden]; below: as for `attend`."""
        query, key, value = self.qkv.projections(x)
        return self.attend(query, key, value, run, below)


class QueryAttention(Attention):
    """Keys and values come from the layer's input, queries from position vectors (PanGu-α report, section 2.2.2)."""

    def _make_projections(self, build: Builder) -> None:
        self.query = ColumnParallelLinear(build, "query", from_table=True)
        self.key_value = ColumnParallelLinear(build, "key_value")

    def forward(self, x: Tensor, position_vectors: Tensor, run: Pass, below: Tensor | None) -> Carried:
        """x, position_vectors (of all positions): [sequence, batch, hidden]; below: as for `attend`."""
        key, value = self.key_value.projections(x)
        return self.attend(self.query(position_vectors), key, value, run, below)


class FeedForward(nn.Module):
    """Up, activation, down; a gated activation has its gate stored above `up`."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        super().__init__()
        self.recompute = "activation" in options.recompute_parts
        self.up = ColumnParallelLinear(build, "up")
        self.down = RowParallelLinear(build, "down")
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[sequence, batch, hidden] -> the same."""
        return checkpointed(self._out, self.up(x), on=self.recompute)

    def _out(self, inner: Tensor) -> Tensor:
        return self.down(self.activation(inner))


class Block(nn.Module):
    """Pre-norm (Radford et al. 2019): x + Attention(LN(x)), then x + FFN(LN(x)). Post-norm (Vaswani et al. 2017):
    LN(x + Attention(x)), then LN(x + FFN(x))."""

    attention: nn.Module

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        super().__init__()
        self.attention_norm = make_norm(build, "attention_norm", config.norm_eps, config.norm)
        self.attention = self._make_attention(config, build.at("attention"), options)
        self.mlp_norm = make_norm(build, "mlp_norm", config.norm_eps, config.norm)
        self.mlp = FeedForward(config, build.at("mlp"), options)
        self.attention_dropout = hidden_dropout(build, config.dropout, "attention_output")
        self.mlp_dropout = hidden_dropout(build, config.dropout, "mlp_output")
        self.post_norm = config.norm_placement == "post"
        self.recompute_norm = "norm" in options.recompute_parts

    def _make_attention(self, config: ModelConfig, build: Builder, options: Options) -> nn.Module:
        return SelfAttention(config, build, options)

    def forward(self, carried: Carried, run: Pass) -> Carried:
        """What the layer below hands over -> what this one does."""
        return self._both(carried, lambda x: self.attention(x, run, carried.scores), run)

    def _both(self, carried: Carried, attend: Callable[[Tensor], Carried], run: Pass) -> Carried:
        x = carried.hidden
        if self.post_norm:
            attended, scores = attend(x)
            x = x + self.attention_dropout(attended, run.keys)
            # the other norm's output is the layer's, which full recompute keeps as well
            normed, change = self._normed(x, self.attention_norm, self.mlp, run)
            return Carried(self.mlp_norm(normed + self.mlp_dropout(change, run.keys)), scores)
        _, (attended, scores) = self._normed(x, self.attention_norm, attend, run)
        x = x + self.attention_dropout(attended, run.keys)
        _, change = self._normed(x, self.mlp_norm, self.mlp, run)
        return Carried(x + self.mlp_dropout(change, run.keys), scores)

    def _normed(
        self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Result], run: Pass
    ) -> tuple[Tensor, Result]:
        """norm(x), and what `sublayer` makes of it."""
        normed = norm(x)
        with run.saved.discarding(normed, norm, x, self.recompute_norm):
            return normed, sublayer(normed)


class QueryBlock(Block):
    """PanGu-α's top layer: a block whose queries are position vectors, neither normed nor dropped.

    The residual stream is still the layer's input, not the query (PanGu-α's released code). Position bias, mask and
    residual scores are those of the other layers (ours: the released models have none of the three options).
    """

    def _make_attention(self, config: ModelConfig, build: Builder, options: Options) -> nn.Module:
        return QueryAttention(config, build, options)

    def forward(self, carried: Carried, position_vectors: Tensor, run: Pass) -> Carried:  # type: ignore[override]
        """position_vectors (of all positions): [sequence, batch, hidden]; otherwise as `Block`."""
        return self._both(carried, lambda x: self.attention(x, position_vectors, run, carried.scores), run)
