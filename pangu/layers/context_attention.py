"""Attention over sequences that ranks split (`parallel.context`), as kernels that call other kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.context import ContextRegion, GatheredKeys, RingKeys, to_heads, to_sequence
from pangu.config.model import ModelConfig
from pangu.layers.attention_blocks import (
    Blocks,
    ExplicitBlocks,
    FlashBlocks,
    Gradients,
    Output,
    Scores,
    Tile,
    TileDropout,
    merge,
    with_sinks,
)
from pangu.layers.biases import Bias
from pangu.layers.cpu import CpuBlocks
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernels import QKV, Kernel, MaskAndBias
from pangu.layers.recompute import checkpointed
from pangu.layers.triton_attention import TritonBlocks


def context_kernel(
    config: ModelConfig, name: str, recompute: bool, region: ContextRegion
) -> Callable[[MaskAndBias], Kernel]:
    """Return a factory of kernels for split sequences, based on the kernel of this name."""
    # `recompute`: recompute what it saves besides queries, keys and values, without communication
    drops = config.attention_dropout > 0
    block, ring = region.blocks
    kernel = sequence_kernel(name, config.attention_sinks, drops)
    if ring.size > 1:
        scores, recompute = config.residual_scores, False
        kernel = partial(BlockAttention, name=name, region=ring, drops=drops, residual_scores=scores)
    return kernel if block.size == 1 else partial(HeadExchange, kernel=kernel, region=region, recompute=recompute)


def sequence_kernel(name: str, sinks: bool, drops: bool) -> Callable[[MaskAndBias], Kernel]:
    """Return a factory of kernels for complete sequences, with or without sinks and dropout, based on this kernel."""
    if not sinks or name in ("reference", "flex"):
        return KERNELS[name]
    # libraries have no sinks, but their sums of exponentials are enough
    return partial(BlockAttention, name=name, drops=drops)


def _of_heads(dropout: Dropout, region: ContextRegion) -> Dropout:
    shared, place = copy(dropout), dropout.region
    shared.region = replace(place, rank=place.rank * region.size + region.rank, size=place.size * region.size)
    return shared


class HeadExchange:
    """Kernel in which every rank attends with some heads to all tokens of its block (Ulysses; Jacobs et al. 2023).

    If there are several blocks, the kernel below exchanges keys and values in a ring of them (Fang & Zhao 2024).
    """

    def __init__(
        self, terms: MaskAndBias, kernel: Callable[[MaskAndBias], Kernel], region: ContextRegion, recompute: bool
    ) -> None:
        """Prepare the kernel for this rank's heads."""
        region, self.ring = region.blocks
        self.region, self.recompute = region, recompute
        if terms.bias is not None:
            slopes = terms.bias.slopes
            local_slopes = None if slopes is None else slopes.chunk(region.size)[region.rank]
            terms = replace(terms, bias=Bias(terms.bias.by_distance.chunk(region.size, 1)[region.rank], local_slopes))
        self.kernel = kernel(terms)

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention and scores [batch, heads / ranks, sequence, sequence]; see `Kernel`."""
        ranks, head_dropout = self.region.size, _of_heads(dropout, self.region)
        # with few key heads, each rank gets those that its queries need
        repeats = math.lcm(qkv.key.shape[1], ranks) // qkv.key.shape[1]
        heads = (qkv.query, *(part.repeat_interleave(repeats, dim=1) for part in (qkv.key, qkv.value)))
        parts = [part.unflatten(1, (ranks, -1)) for part in heads]
        whole = to_heads(torch.cat(parts, 2), self.region)
        if keys is not None and keys.rows is not None:
            part = self.ring if self.ring.size > 1 else None
            keys = keys.on(keys.rows.new_empty(whole.shape[0], whole.shape[2]), part)
        local_qkv = QKV(*whole.split([part.shape[2] for part in parts], 1))
        sinks = None if sinks is None else sinks.chunk(self.region.size)[self.region.rank]
        output, scores = checkpointed(self.kernel, local_qkv, head_dropout, keys, below, sinks, on=self.recompute)
        return to_sequence(output, self.region).flatten(1, 2), scores


class BlockAttention:
    """Kernel whose queries stay, while keys and values of other ranks come and go (`GatheredKeys`, `RingKeys`)."""

    # They come again in the backward pass; scores are never stored.
    def __init__(
        self,
        terms: MaskAndBias,
        name: str,
        region: ContextRegion | None = None,
        drops: bool = False,
        residual_scores: bool = False,
    ) -> None:
        """Prepare the blocks of this rank; without a region, this rank has all tokens."""
        self.region, self.residual_scores = region, residual_scores
        # the layer above may see keys outside of this one's window, and adds their scores
        self.length, self.window = terms.length, None if residual_scores else terms.mask.window
        self.bias = None if terms.bias is None else terms.bias.by_distance
        self.blocks: Blocks = blocks_for(name, terms, drops)(terms)

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention and scores [batch, heads, sequence / ranks, sequence]; see `Kernel`."""
        # the seed of the device's generator must differ between the ranks
        if self.region is not None and isinstance(self.blocks, FlashBlocks):
            dropout = _of_heads(dropout, self.region)
        drops = TileDropout(dropout, keys)
        output, scores = _Attend.apply(*qkv, self.bias, below, sinks, self, drops)
        return output, scores


def attention_tiles(
    region: ContextRegion | None, length: int, window: int | None, source: int | None
) -> Iterator[tuple[slice, slice, Tile]]:
    """Yield this rank's queries with the keys of `source` (None: of all ranks) that they see, and their block."""
    if region is None:
        every = slice(0, length)
        yield every, every, Tile(0, length, 0, length)
        return
    chunk = length // (2 * region.size)
    for number, place in enumerate(region.chunks):
        queries, start = slice(number * chunk, (number + 1) * chunk), place * chunk
        oldest = 0 if window is None else max(0, start - window + 1)
        if source is None:
            keys = slice(oldest, start + chunk)
            yield queries, keys, Tile(start, chunk, keys.start, keys.stop - keys.start)
            continue
        their = replace(region, rank=source).chunks
        for half, other in reversed(list(enumerate(their))):
            if other <= place and (other + 1) * chunk > oldest:
                yield queries, slice(half * chunk, (half + 1) * chunk), Tile(start, chunk, other * chunk, chunk)


def blocks_for(name: str, terms: MaskAndBias, drops: bool) -> type[Blocks]:
    """Return the block attention for a kernel's name."""
    # Fused kernels give no gradient of a learned bias, and the dropout of libraries depends on the blocks.
    if name == "flash":
        return FlashBlocks
    if name == "triton":
        return TritonBlocks
    learned = terms.bias is not None and terms.bias.slopes is None
    fused = name == "sdpa" and terms.device.type == "cpu"
    return CpuBlocks if fused and not (learned or drops) else ExplicitBlocks


class _LocalKeys:
    """Keys and values of this rank, which has all; see `GatheredKeys`."""

    def __init__(self, pair: Tensor) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[tuple[None, Tensor]]:
        yield None, self.pair

    def reduce_grad(self, gradient: Tensor) -> None:
        self.pair = gradient

    def grad(self) -> Tensor:
        return self.pair


def exchange_keys(pair: Tensor, region: ContextRegion | None) -> GatheredKeys | RingKeys | _LocalKeys:
    """Return the exchange of this rank's keys and values [2, batch, heads, sequence / ranks, head size]."""
    if region is None:
        return _LocalKeys(pair)
    return (RingKeys if region.kind == "ring" else GatheredKeys)(pair, region)


def _part(query: Tensor, pair: Tensor, queries: slice, keys: slice) -> QKV:
    key, value = pair[..., keys, :]
    return QKV(query[:, :, queries], key, value)


def _columns(scores: Tensor | None, queries: slice, block: Tile) -> Tensor | None:
    return None if scores is None else scores[:, :, queries, block.key : block.key + block.keys]


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        below: Tensor | None,
        sinks: Tensor | None,
        attention: BlockAttention,
        drops: TileDropout,
    ) -> tuple[Tensor, Tensor | None]:
        scores = None
        if attention.residual_scores:
            scores = query.new_zeros(*query.shape[:3], attention.length)
        attended: dict[int, Output] = {}
        states = []
        for source, pair in exchange_keys(torch.stack((key, value)), attention.region):
            for queries, keys, block in attention_tiles(attention.region, attention.length, attention.window, source):
                passed = Scores(_columns(below, queries, block), _columns(scores, queries, block))
                part = _part(query, pair, queries, keys)
                one = attention.blocks.forward(part, block, drops.rows(queries), passed)
                states.append(one.state)
                attended[queries.start] = merge(attended[queries.start], one) if queries.start in attended else one
        halves = [attended[start] for start in sorted(attended)]
        output, key_log_sum = (torch.cat(parts, 2) for parts in zip(*(half[:2] for half in halves), strict=True))
        log_sum = with_sinks(key_log_sum, sinks)
        if sinks is not None:
            output = output * (key_log_sum - log_sum).exp().unsqueeze(-1)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum, below, sinks)
        ctx.rest = attention, drops, states
        return output, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum, below, sinks = ctx.saved_tensors
        attention, drops, states = ctx.rest
        wide, states = torch.promote_types(query.dtype, torch.float32), iter(states)
        grad_query = torch.zeros_like(query, dtype=wide)
        grad_bias = torch.zeros_like(attention.bias) if ctx.needs_input_grad[3] else None
        grad_scores = grads[1].clone() if attention.residual_scores else None
        exchange = exchange_keys(torch.stack((key, value)), attention.region)
        for source, pair in exchange:
            grad_pair = torch.zeros_like(pair, dtype=wide)
            for queries, keys, block in attention_tiles(attention.region, attention.length, attention.window, source):
                passed = Scores(_columns(below, queries, block), _columns(grad_scores, queries, block))
                full = Output(output[:, :, queries], log_sum[:, :, queries], next(states))
                into = Gradients(_part(grad_query, grad_pair, queries, keys), grad_bias)
                part = _part(query, pair, queries, keys)
                attention.blocks.backward(grads[0][:, :, queries], part, block, drops.rows(queries), passed, full, into)
            exchange.reduce_grad(grad_pair)
        grad_key, grad_value = exchange.grad().to(query.dtype)
        grad_below = grad_scores if ctx.needs_input_grad[4] else None
        grad_sinks = None
        if ctx.needs_input_grad[5]:
            # a sink is the score of a key of value 0: its gradient is its probability times (0 - mean gradient)
            means = (grads[0].to(wide) * output.to(wide)).sum(-1)
            shares = (sinks.to(wide)[:, None] - log_sum).exp()
            grad_sinks = -(shares * means).sum((0, 2)).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_bias, grad_below, grad_sinks, None, None
