"""The pre-norm Transformer layer that GPT and PanGu-α share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.schema import ModelConfig
from pangu.layers.attention import AttentionCore, AttentionMask, merge_heads, split_heads
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys, hidden_dropout
from pangu.layers.linear import ColumnParallelLinear, LayerNorm, RowParallelLinear


@dataclass(frozen=True)
class Pass:
    """What one pass over a micro-batch carries beside the hidden states."""

    mask: AttentionMask
    """Who sees whom."""
    positions: Tensor
    """int64 [batch, sequence], position of each token in its document."""
    keys: DropoutKeys | None
    """Keys of the dropout masks; None in evaluation."""


def gelu(form: str) -> Callable[[Tensor], Tensor]:
    """GELU (Hendrycks & Gimpel 2016): `gelu_tanh`, its tanh approximation, or `gelu`, the erf form."""
    approximate = "tanh" if form == "gelu_tanh" else "none"
    return lambda x: F.gelu(x, approximate=approximate)


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of weights that write into the residual stream (Radford et al. 2019, section 2.3)."""
    return config.init_std / math.sqrt(2 * config.layers)


class SelfAttention(nn.Module):
    """Queries, keys and values all come from the layer's input."""

    def __init__(self, config: ModelConfig, build: Builder, kernel: str) -> None:
        super().__init__()
        width = config.hidden
        self.head_size = config.head_size
        projections = {"query": width, "key": width, "value": width}
        self.qkv = ColumnParallelLinear(build, "qkv", width, projections, config.init_std)
        self.output = RowParallelLinear(build, "output", width, width, residual_std(config))
        self.core = AttentionCore(build, kernel, config.attention_dropout)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """[sequence, batch, hidden] -> the same."""
        query, key, value = (split_heads(part, self.head_size) for part in self.qkv(x).chunk(3, dim=-1))
        return self.output(merge_heads(self.core(query, key, value, run.mask, run.keys)))


class QueryAttention(nn.Module):
    """Keys and values come from the layer's input, queries from position vectors (PanGu-α report, section 2.2.2)."""

    def __init__(self, config: ModelConfig, build: Builder, kernel: str) -> None:
        super().__init__()
        width = config.hidden
        self.head_size = config.head_size
        self.query = ColumnParallelLinear(build, "query", width, {"query": width}, config.init_std)
        self.key_value = ColumnParallelLinear(
            build, "key_value", width, {"key": width, "value": width}, config.init_std
        )
        self.output = RowParallelLinear(build, "output", width, width, residual_std(config))
        self.core = AttentionCore(build, kernel, config.attention_dropout)

    def forward(self, x: Tensor, position_vectors: Tensor, run: Pass) -> Tensor:
        """x, position_vectors: [sequence, batch, hidden]; returns the same shape."""
        query = split_heads(self.query(position_vectors), self.head_size)
        key, value = (split_heads(part, self.head_size) for part in self.key_value(x).chunk(2, dim=-1))
        return self.output(merge_heads(self.core(query, key, value, run.mask, run.keys)))


class FeedForward(nn.Module):
    """Up, GELU, down."""

    def __init__(self, config: ModelConfig, build: Builder) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(build, "up", config.hidden, {"up": config.ffn_size}, config.init_std)
        self.down = RowParallelLinear(build, "down", config.ffn_size, config.hidden, residual_std(config))
        self.activation = gelu(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """[sequence, batch, hidden] -> the same."""
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """x + Attention(LN(x)), then x + FFN(LN(x))."""

    attention: nn.Module

    def __init__(self, config: ModelConfig, build: Builder, kernel: str) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(build, "attention_norm", config.hidden, config.norm_eps)
        self.attention = self._make_attention(config, build.at("attention"), kernel)
        self.mlp_norm = LayerNorm(build, "mlp_norm", config.hidden, config.norm_eps)
        self.mlp = FeedForward(config, build.at("mlp"))
        self.attention_dropout = hidden_dropout(build, config.dropout, "attention_output")
        self.mlp_dropout = hidden_dropout(build, config.dropout, "mlp_output")

    def _make_attention(self, config: ModelConfig, build: Builder, kernel: str) -> nn.Module:
        return SelfAttention(config, build, kernel)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """[sequence, batch, hidden] -> the same."""
        return self._add(x, self.attention(self.attention_norm(x), run), run)

    def _add(self, x: Tensor, attended: Tensor, run: Pass) -> Tensor:
        x = x + self.attention_dropout(attended, run.keys)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), run.keys)


class QueryBlock(Block):
    """PanGu-α's top layer: a block whose queries are position vectors, neither normed nor dropped.

    The residual stream is still the layer's input, not the query (PanGu-α's released code).
    """

    def _make_attention(self, config: ModelConfig, build: Builder, kernel: str) -> nn.Module:
        return QueryAttention(config, build, kernel)

    def forward(self, x: Tensor, position_vectors: Tensor, run: Pass) -> Tensor:  # type: ignore[override]
        """x, position_vectors: [sequence, batch, hidden]; returns the same shape."""
        return self._add(x, self.attention(self.attention_norm(x), position_vectors, run), run)
