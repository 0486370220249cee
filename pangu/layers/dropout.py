"""Dropout without state, whose masks depend on neither layout, device, format, recompute nor resume."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pangu.layers.builder import Builder
from pangu.layers.dropout_masks import DropAndAdd, row_keys
from pangu.topology.random import random_key

if TYPE_CHECKING:
    from pangu.topology.context import ContextRank


@dataclass(frozen=True)
class DropoutKeys:
    """Keys of the dropout masks of one micro-batch."""

    seed: int
    step: int
    samples: tuple[int, ...]
    """Global indices of the rows of the micro-batch, consecutive and ascending."""
    rows: Tensor | None = None
    """Keys of sample and position, int64 [sequence, batch]; None: not computed yet."""
    head_keys: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """First head and number of heads -> keys that `Dropout.rows_of` derives from `rows`, shared by all layers."""

    def on(self, tokens: Tensor, part: ContextRank | None = None) -> DropoutKeys:
        """Return the keys with `rows` for tokens [batch, sequence], on their device; `part`: part of the sequences."""
        assert self.samples == tuple(range(self.samples[0], self.samples[0] + tokens.shape[0])), self.samples
        chunks, numbers = ((tokens,), (0,)) if part is None else (tokens.chunk(2, 1), part.chunks)
        starts = (number * chunks[0].shape[1] for number in numbers)
        rows = [row_keys(chunk, self.samples[0], start) for chunk, start in zip(chunks, starts, strict=True)]
        return replace(self, rows=rows[0] if part is None else torch.cat(rows))

    def select(self, samples: tuple[int, ...]) -> DropoutKeys:
        """Return the keys of some of the rows, which are consecutive."""
        assert self.rows is not None
        first = samples[0] - self.samples[0]
        return replace(self, samples=samples, rows=self.rows[:, first : first + len(samples)].contiguous())


class Masks(NamedTuple):
    """Keys from which the masks of attention probabilities are made."""

    rows: Tensor
    """Row keys, int64 [batch, heads / ranks, queries]."""
    place: Tensor
    """Key of the place and the step, int64 scalar on the host."""
    probability: float


def keys_of_heads(rows: Tensor, like: Tensor, first: int) -> Tensor:
    """Return int64 [batch, heads, sequence] from row keys [sequence, batch], for heads from `first` on (`like`)."""
    # -1 is no sample; contiguous once, where every layer's kernel would make it so
    return (rows.t()[:, None] ^ row_keys(like, -1, first)).contiguous()


class Dropout:
    """Dropout, which scales kept elements by 1 / (1 - probability) (Srivastava et al. 2014)."""

    # A rank with a shard of a tensor applies its part of the mask of the full tensor.
    def __init__(self, build: Builder, probability: float, name: str) -> None:
        """Create a dropout, whose `name` is unique below the path of `build`."""
        self.probability = probability
        self.place = build.at(name).path
        self.region = build.region

    def hidden(self, x: Tensor, keys: DropoutKeys | None, residual: Tensor | None = None) -> Tensor:
        """Drop from hidden states [sequence (/ ranks with sequence parallelism), batch, hidden], and add `residual`."""
        # One kernel for both; `keys` is None in evaluation: no dropout.
        if keys is None or self.probability == 0.0:
            return x if residual is None else residual + x
        assert keys.rows is not None
        rows = self.region.local_sequence(keys.rows)
        return DropAndAdd.apply(x, residual, rows, self.key(keys), self.probability)

    def probabilities(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Drop from attention probabilities [batch, heads / ranks, queries, keys]."""
        if keys is None or self.probability == 0.0:
            return x
        return DropAndAdd.apply(x, None, self.rows_of(x, keys), self.key(keys), self.probability)

    def rows_of(self, x: Tensor, keys: DropoutKeys) -> Tensor:
        """Return row keys int64 [batch, heads / ranks, queries] of probabilities [..., keys] or queries [..., size]."""
        assert keys.rows is not None
        heads = self.region.rank * x.shape[1], x.shape[1]
        if heads not in keys.head_keys:
            keys.head_keys[heads] = keys_of_heads(keys.rows, x.detach()[:1, :, 0, 0], heads[0])
        return keys.head_keys[heads]

    def masks(self, query: Tensor, keys: DropoutKeys | None) -> Masks | None:
        """Return the masks of `probabilities` for a kernel that applies them itself; None: no dropout."""
        if keys is None or self.probability == 0.0:
            return None
        return Masks(self.rows_of(query, keys), torch.tensor(self.key(keys)), self.probability)

    def in_kernel(self, keys: DropoutKeys | None) -> float:
        """Return the probability for a fused kernel, or 0 without keys, and seed the device's generator."""
        # The kernel draws one mask for all its rows: recompute and resume repeat it, but it depends on the micro-batch
        # size and on the sharding of heads.
        if keys is None or self.probability == 0.0:
            return 0.0
        assert keys.rows is not None
        key, device = random_key(self.key(keys), self.region.rank, *keys.samples), keys.rows.device
        # torch.manual_seed would seed every device
        source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
        source.manual_seed(key)
        return self.probability

    def key(self, keys: DropoutKeys) -> int:
        """Return the key of the place and the step, as a signed integer."""
        return random_key(keys.seed, keys.step, self.place) - 2**63
