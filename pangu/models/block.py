"""Transformer layer of GPT and PanGu-α."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.layers.attention import AttentionCore, KVCache, merge_heads
from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.experts import MixtureOfExperts
from pangu.layers.kernels import QKV, Kernel, MaskAndBias
from pangu.layers.linear import ColumnParallelLinear, HeadProjections, RowParallelLinear, make_norm
from pangu.layers.recompute import SavedTensors, checkpointed, will_repeat
from pangu.layers.turns import LayerPart, Turn
from pangu.models.latent_attention import LatentAttention

if TYPE_CHECKING:
    from pangu.layers.experts import Routes


@dataclass(frozen=True)
class Options:
    """Options of a forward and backward pass that do not change its results."""

    kernel: str = "reference"
    recompute: int | None = 0
    """Number of layers, from the first on, that the backward pass recomputes; None: all."""
    recompute_parts: tuple[str, ...] = ()
    """Parts of layers to recompute: `attention` (scores to dropout), `activation` (MLP), `norm` (read by a matrix)."""
    loss_chunk: int | None = None
    """Number of tokens whose logits exist at a time; None: all."""
    offload: bool = False
    turns: tuple[Turn, ...] = ()
    """Order in which layers compute the halves of a micro-batch, as in `Schedule`; (): both at once."""

    @classmethod
    def of(cls, config: RunConfig, kernel: str, turns: tuple[Turn, ...] = ()) -> Options:
        """Return the options of a run with this attention kernel and these turns."""
        memory, offload = config.memory, "activations" in config.memory.offload
        return cls(kernel, memory.recomputed_layers, memory.recomputed_parts, config.loss_chunk, offload, turns)


@dataclass(frozen=True)
class ForwardContext:
    """Inputs that all layers share in one forward pass of a micro-batch."""

    kernels: tuple[Kernel, Kernel]
    """Attention kernels with the mask and bias of this micro-batch, of layers without and with `window`."""
    positions: Tensor
    """Position of each token in its document, int64 [batch, sequence]."""
    keys: DropoutKeys | None
    """Dropout keys; None in evaluation."""
    saved: SavedTensors
    rotary: Callable[[Tensor], Tensor] | None = None
    cache: KVCache | None = None
    """KV cache; None if the forward pass has all tokens."""
    first: int = 0
    """Number of cached tokens before these."""
    routes: Routes | None = None
    """Decisions of expert routers, which a recompute reuses; None: no experts."""
    terms: tuple[MaskAndBias, ...] = ()
    """Masks of both kernels, where the largest logits are recorded."""


class HiddenStates(NamedTuple):
    """Output of a layer."""

    hidden: Tensor
    """Hidden states [sequence (/ ranks with sequence parallelism), batch, hidden]."""
    # He et al. 2021, section 3; None in the first layer, and without `model.residual_scores`
    scores: Tensor | None = None
    """Attention scores [batch, heads / ranks, queries, keys] without bias and mask, which the next layer adds."""


def _gelu_tanh(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # For compilers, which fuse it into one loop: (1 + tanh u) / 2 = sigmoid(2u), as exp is faster than tanh on a CPU.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


def _swiglu(x: Tensor) -> Tensor:
    """Return SiLU of the first half times the second half (Shazeer 2020, equation 6)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _clamped_swiglu(x: Tensor) -> Tensor:
    """Return the SwiGLU of gpt-oss (its released code), of which no element is large."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "fast_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": _swiglu,
    "clamped_swiglu": _clamped_swiglu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
"""Activations: GELU, its tanh and sigmoid approximations (Hendrycks & Gimpel 2016, section 2), SwiGLUs, ReLU, ReLU²."""


class Attention(nn.Module):
    """Attention with projections; PanGu-α's query layer (report, section 2.2.2) has queries from position vectors."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options, number: int) -> None:
        """Build the projections of layer `number`, and norms of heads if configured."""
        super().__init__()
        self.sinks = build.optional("sinks")
        self.has_window, self.has_rope = config.has_window(number), config.has_rope(number)
        heads = config.head_size, config.ranks_per_key_head(build.region.size)
        if number == config.query_layer:
            self.query = HeadProjections(build, "query", config.head_size, from_table=True)
            self.key_value = HeadProjections(build, "key_value", *heads)
        else:
            self.qkv = HeadProjections(build, "qkv", *heads)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm:
            self.query_norm = make_norm(build, "query_norm", config.norm_eps, config.norm)
            self.key_norm = make_norm(build, "key_norm", config.norm_eps, config.norm)
        self.output = RowParallelLinear(build, "output")
        recompute = "attention" in options.recompute_parts and build.context is None
        self.core = AttentionCore(build, config.attention_dropout, recompute, config.residual_scores)
        self.logits = None if build.logits is None else build.logits.of_layer(number, build)

    def project(self, x: Tensor, context: ForwardContext, queries: Tensor | None) -> QKV:
        """Return queries, keys and values of x [sequence, batch, hidden]."""
        # `queries`: position vectors [sequence, batch, hidden], for the query layer
        if queries is None:
            query, key, value = self.qkv(x)
        else:
            (query,), (key, value) = self.query(queries), self.key_value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None and self.has_rope:
            query, key = context.rotary(query), context.rotary(key)
        if context.cache is not None:
            key, value = context.cache.append(self, context.first, key, value)
        return QKV(query, key, value)

    def finish(self, attended: Tensor, context: ForwardContext) -> Tensor:
        """Return the output [sequence, batch, hidden] for attention [batch, heads / ranks, sequence, head size]."""
        output: Tensor = self.output(merge_heads(attended))
        return output


class FeedForward(nn.Module):
    """Dense feed-forward layer, which ignores `routes`."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        """Build both matrices."""
        super().__init__()
        self.recompute = "activation" in options.recompute_parts
        self.up = ColumnParallelLinear(build, "up")
        self.down = RowParallelLinear(build, "down")
        self.activation = ACTIVATIONS[config.activation]
        self.compute: Callable[..., Tensor] = checkpointed

    def forward(self, x: Tensor, routes: Routes | None) -> Tensor:
        """Map x [sequence, batch, hidden] to an output of the same shape."""
        return self._finish(self.up(x))

    def halves(self, x: Tensor) -> Iterator[Tensor | None]:
        """Compute in two steps: yield None after the first one, and then the output."""
        inner = self.up(x)
        # a recompute ends when the last tensor is saved: one that is saved later would prolong it
        output = self._finish(inner) if will_repeat() else None
        yield None
        yield self._finish(inner) if output is None else output

    def _finish(self, inner: Tensor) -> Tensor:
        return self.compute(_activate, self, inner, on=self.recompute)


def _activate(layer: FeedForward, inner: Tensor) -> Tensor:
    output: Tensor = layer.down(layer.activation(inner))
    return output


def _feed_forward(config: ModelConfig, build: Builder, options: Options, number: int) -> nn.Module:
    if not config.has_experts(number):
        return FeedForward(config, build, options)
    shared = FeedForward(config, build.at("shared"), options) if config.shared_experts else None
    recompute = "activation" in options.recompute_parts
    return MixtureOfExperts(config, build, number, ACTIVATIONS[config.activation], recompute, shared)


class Block(nn.Module):
    """Transformer layer, pre-norm (Radford et al. 2019): x + Attention(LN(x)), then x + FFN(LN(x)).

    In PanGu-α's query layer the queries are position vectors, neither normed nor dropped; the residual stream is still
    the layer's input (PanGu-α's released code). It shares position bias, mask and residual scores with the other layers
    (our choice: the released models have none of the three).
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options, number: int) -> None:
        """Build layer `number` below the path of `build`."""
        super().__init__()
        self.attention_norm = make_norm(build, "attention_norm", config.norm_eps, config.norm)
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, build.at("attention"), options, number)
        self.mlp_norm: nn.Module | None = None
        if config.parallel_block != "shared_norm":
            self.mlp_norm = make_norm(build, "mlp_norm", config.norm_eps, config.norm)
        self.mlp = _feed_forward(config, build.at("mlp"), options, number)
        self.attention_dropout = Dropout(build, config.dropout, "attention_output")
        self.mlp_dropout = Dropout(build, config.dropout, "mlp_output")
        self.recompute_norm = "norm" in options.recompute_parts
        self.exchanges = isinstance(self.mlp, MixtureOfExperts) and self.mlp.expert_region is not None

    def forward(self, below: HiddenStates, context: ForwardContext, queries: Tensor | None) -> HiddenStates:
        """Return the hidden states after this layer; `queries`: position vectors, for the query layer."""
        x, scores = below
        attended, scores = self.attend(self.project(x, context, queries), context, scores)
        return HiddenStates(self.feed(self.join(x, attended, context), x, context), scores)

    def steps(
        self, below: HiddenStates, context: ForwardContext, queries: Tensor | None
    ) -> Iterator[tuple[LayerPart, HiddenStates]]:
        """Compute part by part: yield each with the last tensor that it sends, and then what `forward` returns."""
        if not self.exchanges:
            yield LayerPart.OUTPUT, self(below, context, queries)
            return
        assert isinstance(self.mlp, MixtureOfExperts)
        x, scores = below
        attended, scores = self.attend(self.project(x, context, queries), context, scores)
        x = self.join(x, attended, context)
        assert self.mlp_norm is not None
        assert context.routes is not None
        with context.saved.discarding(self.mlp_norm, x, self.recompute_norm) as normed:
            steps = self.mlp.steps(normed, context.routes)
            sent = next(steps)  # later steps do not save the norm's output
        yield LayerPart.ATTENTION, HiddenStates(sent)
        yield LayerPart.EXPERTS, HiddenStates(next(steps))
        change = self.of_mlp(next(steps))
        yield LayerPart.OUTPUT, HiddenStates(self.mlp_dropout.hidden(change, context.keys, x), scores)

    def project(self, x: Tensor, context: ForwardContext, queries: Tensor | None) -> QKV:
        """Return queries, keys and values for the layer's input."""
        with context.saved.discarding(self.attention_norm, x, self.recompute_norm) as normed:
            return self.attention.project(normed, context, queries)

    def attend(self, qkv: QKV, context: ForwardContext, below: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the kernel's output, and the scores if the next layer adds them; `below`: scores of the last layer."""
        attention = self.attention
        if attention.logits is not None:
            attention.logits.record(qkv.query, qkv.key, context.terms, attention.has_window)
        kernel = context.kernels[int(attention.has_window)]  # torch 2.11 traces no bool as an index
        return attention.core(qkv, kernel, context.keys, below, attention.sinks)

    def join(self, x: Tensor, attended: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream with the output of attention, for the layer's input."""
        output = self.of_attention(self.attention.finish(attended, context))
        return self.attention_dropout.hidden(output, context.keys, x)

    def feed(self, x: Tensor, below: Tensor, context: ForwardContext) -> Tensor:
        """Return the layer's output for the residual stream after attention, and the layer's input `below`."""
        change = self.of_mlp(self._mlp(x, context))
        return self.mlp_dropout.hidden(change, context.keys, x)

    def of_attention(self, output: Tensor) -> Tensor:
        """Return what the output of attention adds to the residual stream, without dropout."""
        return output

    def of_mlp(self, output: Tensor) -> Tensor:
        """Return what the output of the feed-forward layer adds to the residual stream, without dropout."""
        return output

    def _mlp(self, x: Tensor, context: ForwardContext) -> Tensor:
        norm, again = (self.attention_norm, True) if self.mlp_norm is None else (self.mlp_norm, self.recompute_norm)
        with context.saved.discarding(norm, x, again) as normed:
            return cast(Tensor, self.mlp(normed, context.routes))


class PostNormBlock(Block):
    """Transformer layer, post-norm (Vaswani et al. 2017): LN(x + Attention(x)), then LN(x + FFN(x))."""

    def project(self, x: Tensor, context: ForwardContext, queries: Tensor | None) -> QKV:
        """Return queries, keys and values for the layer's input."""
        return self.attention.project(x, context, queries)

    def feed(self, x: Tensor, below: Tensor, context: ForwardContext) -> Tensor:
        """Return the layer's output; see `Block`."""
        assert self.mlp_norm is not None
        # full recompute keeps the output of the other norm anyway, as it is that of the layer
        with context.saved.discarding(self.attention_norm, x, self.recompute_norm) as normed:
            change = self.mlp(normed, context.routes)
        return cast(Tensor, self.mlp_norm(self.mlp_dropout.hidden(change, context.keys, normed)))


class SandwichBlock(Block):
    """Transformer layer with norms around each sublayer (Pangu Ultra): x + LN(Attention(LN(x))), same with FFN."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options, number: int) -> None:
        """Build layer `number` below the path of `build`."""
        super().__init__(config, build, options, number)
        self.attention_output_norm = make_norm(build, "attention_output_norm", config.norm_eps, config.norm)
        self.mlp_output_norm = make_norm(build, "mlp_output_norm", config.norm_eps, config.norm)

    def of_attention(self, output: Tensor) -> Tensor:
        """Return what the output of attention adds to the residual stream, without dropout."""
        return cast(Tensor, self.attention_output_norm(output))

    def of_mlp(self, output: Tensor) -> Tensor:
        """Return what the output of the feed-forward layer adds to the residual stream, without dropout."""
        return cast(Tensor, self.mlp_output_norm(output))


class ParallelBlock(Block):
    """Transformer layer with both sublayers side by side (GPT-J, GPT-NeoX): x + Attention(LN(x)) + FFN(LN(x))."""

    def forward(self, below: HiddenStates, context: ForwardContext, queries: Tensor | None) -> HiddenStates:
        """Return the hidden states after this layer; see `Block`."""
        x, scores = below
        with context.saved.discarding(self.attention_norm, x, self.recompute_norm) as normed:
            attended, scores = self.attend(self.attention.project(normed, context, queries), context, scores)
            output = self.attention.finish(attended, context)
            change = self.mlp(normed, context.routes) if self.mlp_norm is None else self._mlp(x, context)
        x = self.attention_dropout.hidden(output, context.keys, x)
        return HiddenStates(self.mlp_dropout.hidden(change, context.keys, x), scores)

    def feed(self, x: Tensor, below: Tensor, context: ForwardContext) -> Tensor:
        """Return the layer's output; see `Block`. A shared norm is computed again, and its output is not kept."""
        return self.mlp_dropout.hidden(self._mlp(below, context), context.keys, x)


def in_turns(
    turns: tuple[Turn, ...],
    on_turn: Callable[[Turn, Tensor], None],
    block: Block,
    below: HiddenStates,
    contexts: tuple[ForwardContext, ...],
    queries: Tensor | None,
) -> HiddenStates:
    """Return the hidden states after a layer that computes halves of a micro-batch, each with its context, in `turns`.

    `on_turn` receives each turn that was taken and its last tensor, whose gradient begins it in the backward pass.
    """
    number = len(contexts)

    def split(x: Tensor | None, dim: int) -> Sequence[Any]:
        return [None] * number if x is None else [half.contiguous() for half in x.chunk(number, dim)]

    inputs = zip(split(below.hidden, 1), split(below.scores, 0), contexts, split(queries, 1), strict=True)
    halves = [block.steps(HiddenStates(x, scores), context, asked) for x, scores, context, asked in inputs]
    outputs: dict[int, HiddenStates] = {}
    for turn in turns if block.exchanges else (turn for turn in turns if turn.part is LayerPart.OUTPUT):
        part, outputs[turn.half] = next(halves[turn.half])
        on_turn(Turn(part, turn.half), outputs[turn.half].hidden)
    hidden, scores = zip(*(outputs[half] for half in range(number)), strict=True)
    return HiddenStates(torch.cat(hidden, 1), None if scores[0] is None else torch.cat(scores))


def make_block(config: ModelConfig, build: Builder, options: Options, number: int) -> Block:
    """Return the layer `number` of a model, below the path of `build`."""
    kinds = {"pre": Block, "post": PostNormBlock, "sandwich": SandwichBlock}
    kind = ParallelBlock if config.parallel_block else kinds[config.norm_placement]
    return kind(config, build, options, number)
