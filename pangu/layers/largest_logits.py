"""Largest attention logit of every head, for QK-clip (Kimi Team 2025, arXiv 2507.20534, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pangu.collectives.context import ContextRegion
from pangu.config.model import ModelConfig
from pangu.config.optimizer import qk_clip_of
from pangu.config.schema import RunConfig
from pangu.layers.attention_blocks import MOST_SCORES, Tile, grouped
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.context_attention import attention_tiles, exchange_keys
from pangu.layers.kernels import MaskAndBias
from pangu.layers.recompute import is_repeating


class LargestLogits:
    """Largest logits [layers, heads] of a step: q kᵀ / sqrt(head size) of the pairs that the mask allows."""

    # Fused kernels do not return them, so their matmul is repeated, in the compute format as they round it.
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Start without logits; `dtype`: compute format."""
        shape, wide = (config.num_blocks, config.heads), torch.promote_types(dtype, torch.float32)
        self.values = torch.full(shape, -math.inf, dtype=wide, device=device)
        """Largest logits that this rank has seen, -inf for the heads of others."""

    @classmethod
    def of_run(cls, config: RunConfig, device: torch.device) -> Self | None:
        """Return those of a run, or None without QK-clip."""
        is_needed = qk_clip_of(config.optimizer) is not None
        return cls(config.model, DTYPES[config.precision.compute], device) if is_needed else None

    def of_layer(self, number: int, build: Builder) -> LayerLogits:
        """Return the part of a layer."""
        return LayerLogits(self.values[number], build.context, build.region.rank)


@dataclass(frozen=True)
class LayerLogits:
    """Largest logits of a layer's heads."""

    values: Tensor
    region: ContextRegion | None
    """Context-parallel region; None: sequences are not split."""
    rank: int
    """Tensor-parallel rank."""

    def record(self, query: Tensor, key: Tensor, terms: Sequence[MaskAndBias], windowed: bool) -> None:
        """Raise the values to the logits of queries and keys [batch, heads, sequence / ranks, head size].

        Only training does so, and a recompute does not repeat it.
        """
        if terms and torch.is_grad_enabled() and not is_repeating():
            self.raise_to(query, key, terms[windowed])

    @torch.no_grad()
    def raise_to(self, query: Tensor, key: Tensor, terms: MaskAndBias) -> None:
        """Raise the values to the largest logits of one mask."""
        heads = query.shape[1]
        local = self.values[self.rank * heads : (self.rank + 1) * heads]
        own = key[None] if self.region is None else key[None].contiguous()
        for source, (keys,) in exchange_keys(own, self.region):
            for rows, columns, block in attention_tiles(self.region, terms.length, terms.mask.window, source):
                for one in _largest(query[:, :, rows], keys[:, :, columns], block, terms):
                    torch.maximum(local, one.to(local.dtype), out=local)


def _largest(query: Tensor, key: Tensor, block: Tile, terms: MaskAndBias) -> Iterator[Tensor]:
    """Yield the largest logit of each head [heads], for a few queries of the block at a time."""
    (batch, heads, queries, size), groups = query.shape, key.shape[1]
    count = max(1, MOST_SCORES // (batch * heads * block.keys))
    for start in range(0, queries, count):
        stop = min(start + count, queries)
        # later keys are not seen
        seen = min(block.keys, max(1, block.query + stop - block.key))
        scores = grouped(query[:, :, start:stop], groups) @ key[:, :, :seen].transpose(-2, -1)
        scores = scores.view(batch, heads, stop - start, seen)
        if not (terms.mask.is_plain_causal and block.is_before):
            places = range(block.query + start, block.query + stop), range(block.key, block.key + seen)
            scores.masked_fill_(terms.mask.dense(*places, scores.device).logical_not(), -math.inf)
        yield scores.amax((0, 2, 3)) * (1.0 / math.sqrt(size))
