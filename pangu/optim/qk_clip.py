"""QK-clip (Kimi Team 2025, arXiv 2507.20534, section 2.1): queries and keys of large logits are scaled down.

A head whose largest logit m of a step exceeds a threshold τ gets γ = τ / m. Its queries and keys are scaled by √γ
each, which scales its logits by γ. Query heads that share a key head share the least γ of them. With latent attention,
all heads share the rotated part of the keys, so that the rotated part of a query is scaled by γ, and the rest as above:

                    projection           factor
    heads           queries, keys        √γ, √γ
    latent          query, key           √γ, √γ     rows of `nope_head_dim`
                    query, shared key    γ, 1       rows of `rope_head_dim`
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pangu.config.model import ModelConfig
from pangu.config.optimizer import qk_clip_of
from pangu.config.schema import RunConfig
from pangu.topology.copy_stream import host_memory

_SCALED = re.compile(r"layers\.(\d+)\.attention\.(query|key)\.(weight|bias)")


class _Part(NamedTuple):
    """Rows of a projection's weights or bias."""

    name: str
    values: Tensor
    layer: int
    projection: str
    first: int
    """First row."""


class QkClip:
    """Factors of a step, and the main parameters that they scale."""

    def __init__(self, threshold: float, model: ModelConfig, rectangles: Iterable[tuple[str, Tensor, int]]) -> None:
        """Find the projections of queries and keys among rectangles of tensors: name, values and first row of each."""
        self._threshold, self._model = threshold, model
        self._parts = [
            _Part(name, values, int(found[1]), found[2], row)
            for name, values, row in rectangles
            if (found := _SCALED.fullmatch(name))
        ]
        self._factors = torch.ones(())
        self._scales: dict[str, Tensor] = {}

    @classmethod
    def of_run(cls, config: RunConfig, rectangles: Iterable[tuple[str, Tensor, int]]) -> Self | None:
        """Return the QK-clip of a run; None without a threshold."""
        threshold = qk_clip_of(config.optimizer)
        return None if threshold is None else cls(threshold, config.model, rectangles)

    def decide(self, logits: Tensor, skipped: Tensor) -> None:
        """Compute √γ of the largest logits [layers, heads] of all ranks; 1 if the step is skipped (a device bool)."""
        layers, groups = logits.shape[0], self._model.kv_heads or self._model.heads
        largest = logits.view(layers, groups, -1).amax(-1)
        clips = (largest > self._threshold) & skipped.logical_not()
        factors = torch.where(clips, (self._threshold / largest).sqrt(), 1.0)
        if any(part.values.device != factors.device for part in self._parts):
            # an offloaded update waits for the device after this
            on_host = host_memory(factors.numel(), factors.dtype, factors.device).view_as(factors)
            factors = on_host.copy_(factors, non_blocking=True)
        self._factors, self._scales = factors, {}

    def scale(self, names: Collection[str]) -> None:
        """Scale those of these tensors that are queries and keys, which the optimizer has updated."""
        for part in (part for part in self._parts if part.name in names):
            self._scales = self._scales or dict(self._rows())
            scale = self._scales[part.projection][part.layer, part.first : part.first + part.values.shape[0]]
            part.values.mul_(scale if part.values.dim() == 1 else scale[:, None])

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors [layers, rows] of each projection."""
        model, factors = self._model, self._factors
        heads = factors.repeat_interleave(model.heads // factors.shape[1], 1)
        if model.latent is None:
            yield "query", heads.repeat_interleave(model.head_size, 1)
            yield "key", factors.repeat_interleave(model.head_size, 1)
            return
        nope, rope = model.latent.nope_head_dim, model.latent.rope_head_dim
        yield "key", heads.repeat_interleave(nope, 1)
        parts = [(heads, nope), (heads.square(), rope)]
        yield "query", torch.cat([part[..., None].expand(-1, -1, size) for part, size in parts], -1).flatten(1)
