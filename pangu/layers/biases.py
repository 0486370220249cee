"""Position biases of attention scores, by head and distance in tokens (of the same document)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.model import ModelConfig
from pangu.layers.builder import Builder


@dataclass(frozen=True)
class Bias:
    """Bias of one micro-batch, shared by all layers."""

    by_distance: Tensor
    """Bias of a key by its distance, [sequence, heads / ranks], fp32 (fp64 in fp64)."""
    slopes: Tensor | None = None
    """Slopes, fp32 [heads / ranks], if the bias is -slope x distance."""

    def dense(self, first: int = 0) -> Tensor:
        """Return [heads / ranks, sequence - first, sequence], for queries from `first` on, up to the diagonal."""
        places = torch.arange(self.by_distance.shape[0], device=self.by_distance.device)
        distances = (places[first:, None] - places).abs()
        return F.embedding(distances, self.by_distance).permute(2, 0, 1)

    def score_mod(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return a score plus its bias, with FlexAttention's signature."""
        return score + self.by_distance[(query - key).abs(), head]


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of every head, 2^(-8 i / heads) for i = 1, 2, ... (Press et al. 2022, section 3)."""
    # Not a power of two: slopes of the next lower power, then every other one of the next higher (released code).
    lower = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return slopes + [2.0 ** (-4 * i / lower) for i in range(1, 2 * (heads - lower), 2)]


class Alibi(nn.Module):
    """Attention with linear biases (Press et al. 2022, section 3), -slope x distance, without parameters."""

    def __init__(self, build: Builder, heads: int) -> None:
        """Choose the slopes of this rank's heads."""
        super().__init__()
        start, stop = build.region.bounds(heads)
        self.slopes = alibi_slopes(heads)[start:stop]
        self._bias = lru_cache(1)(partial(_linear_bias, self.slopes))

    def forward(self, length: int, dtype: torch.dtype, device: torch.device) -> Bias:
        """Return the bias between `length` tokens of a model with compute format `dtype`."""
        return self._bias(length, dtype, device)


def _linear_bias(slopes: list[float], length: int, dtype: torch.dtype, device: torch.device) -> Bias:
    wide = torch.promote_types(dtype, torch.float32)
    head_slopes = torch.tensor(slopes, dtype=wide, device=device)
    distances = torch.arange(length, dtype=wide, device=device)
    return Bias(-distances[:, None] * head_slopes, head_slopes.float())


def relative_bucket(length: int, buckets: int, furthest: int) -> Tensor:
    """Return the bucket of each distance 0, 1, ..., int64 [length] (Raffel et al. 2020, section 2.1, released code)."""
    # The first half of the buckets hold one distance each, the others grow in proportion to it, and the last one holds
    # all from `furthest` on. In fp32 on the CPU, as released, so that every device rounds alike. 8 buckets, furthest
    # 32:
    #
    #    distance   0  1  2  3  4-6  7-11  12-19  20-
    #    bucket     0  1  2  3  4    5     6      7
    exact = buckets // 2
    distances = torch.arange(length)
    share = (distances.clamp(min=1).float() / exact).log() / math.log(furthest / exact)
    coarse = exact + (share * (buckets - exact)).long()
    return torch.where(distances < exact, distances, coarse.clamp(max=buckets - 1))


class RelativeBias(nn.Module):
    """Learned bias by head and bucket of distances, shared by all layers (Raffel et al. 2020, section 2.1)."""

    # Heads are sharded over the ranks, so each rank has the full gradient of its columns.
    def __init__(self, build: Builder, name: str, furthest: int) -> None:
        """Build the table; all distances from `furthest` on share the last bucket."""
        super().__init__()
        self.furthest = furthest
        self.weight = build.parameter(f"{name}.weight")
        self.buckets = len(self.weight)
        self._bucket = torch.zeros(0, dtype=torch.int64)
        """Bucket of each distance of the longest sequence so far."""

    def forward(self, length: int, dtype: torch.dtype, device: torch.device) -> Bias:
        """Return the bias between `length` tokens of a model with compute format `dtype`."""
        if len(self._bucket) < length or self._bucket.device != device:
            self._bucket = relative_bucket(length, self.buckets, self.furthest).to(device)
        return Bias(F.embedding(self._bucket[:length], self.weight.to(torch.promote_types(dtype, torch.float32))))


def make_bias(config: ModelConfig, build: Builder) -> Alibi | RelativeBias:
    """Return the bias module of a model."""
    if config.positions == "alibi":
        return Alibi(build, config.heads)
    return RelativeBias(build, "position_bias", config.furthest_relative)
