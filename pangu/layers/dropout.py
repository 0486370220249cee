"""Dropout whose masks neither layout nor device, format, recompute or resume changes: nothing of them is kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pangu.layers.builder import Builder
from pangu.topology.random import random_key

if TYPE_CHECKING:
    from pangu.topology.context import ContextRank


@dataclass(frozen=True)
class DropoutKeys:
    """Keys of the masks of one micro-batch."""

    seed: int
    step: int
    samples: tuple[int, ...]
    """Global indices of the rows of the micro-batch, each one more than the one before."""
    rows: Tensor | None = None
    """int64 [sequence, batch], keys of sample and position; None: not made yet."""
    of_heads: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """First head and number of heads -> what `Dropout.rows_of` made of `rows` for them, for all layers."""

    def on(self, tokens: Tensor, part: ContextRank | None = None) -> DropoutKeys:
        """With `rows` for tokens [batch, sequence], on their device; `part`: they are that part of a sequence."""
        from pangu.layers.dropout_masks import row_keys

        assert self.samples == tuple(range(self.samples[0], self.samples[0] + tokens.shape[0])), self.samples
        chunks, numbers = ((tokens,), (0,)) if part is None else (tokens.chunk(2, 1), part.chunks)
        starts = (number * chunks[0].shape[1] for number in numbers)
        rows = [row_keys(chunk, self.samples[0], start) for chunk, start in zip(chunks, starts, strict=True)]
        return replace(self, rows=rows[0] if part is None else torch.cat(rows))


class Masks(NamedTuple):
    """What the masks of attention probabilities are made from."""

    rows: Tensor
    """int64 [batch, heads / ranks, queries], row keys."""
    place: Tensor
    """int64 without dimensions, on the host: the key of the place and the step."""
    probability: float


def keys_of_heads(rows: Tensor, like: Tensor, first: int) -> Tensor:
    """int64 [batch, heads, sequence], of row keys [sequence, batch] and the heads from number `first` on; `like`:
    [1, heads]."""
    from pangu.layers.dropout_masks import row_keys

    # -1 is no sample; contiguous once, where every layer's kernel would make it so
    return (rows.t()[:, None] ^ row_keys(like, -1, first)).contiguous()


class Dropout:
    """Zeroes each element with `probability` and scales the others by 1 / (1 - probability) (Srivastava et al. 2014).
    A rank with a shard of a tensor has its part of the mask of the whole."""

    def __init__(self, build: Builder, probability: float, name: str) -> None:
        """`name` is unique below the path of `build`."""
        self.probability = probability
        self.place = build.at(name).path
        self.region = build.region

    def hidden(self, x: Tensor, keys: DropoutKeys | None, residual: Tensor | None = None) -> Tensor:
        """Of hidden states [sequence (/ ranks with sequence parallelism), batch, hidden]; `residual` is added, in the
        same kernel. `keys` is None in evaluation: no dropout."""
        if keys is None or self.probability == 0.0:
            return x if residual is None else residual + x
        from pangu.layers.dropout_masks import DropAndAdd

        assert keys.rows is not None
        rows = self.region.local_sequence(keys.rows)
        return DropAndAdd.apply(x, residual, rows, self.key(keys), self.probability)

    def probabilities(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Of attention probabilities [batch, heads / ranks, queries, keys]."""
        if keys is None or self.probability == 0.0:
            return x
        from pangu.layers.dropout_masks import DropAndAdd

        return DropAndAdd.apply(x, None, self.rows_of(x, keys), self.key(keys), self.probability)

    def rows_of(self, x: Tensor, keys: DropoutKeys) -> Tensor:
        """int64 [batch, heads / ranks, queries], row keys of probabilities [batch, heads / ranks, queries, keys] or of
        queries [batch, heads / ranks, queries, head size]."""
        assert keys.rows is not None
        heads = self.region.rank * x.shape[1], x.shape[1]
        if heads not in keys.of_heads:
            keys.of_heads[heads] = keys_of_heads(keys.rows, x.detach()[:1, :, 0, 0], heads[0])
        return keys.of_heads[heads]

    def masks(self, query: Tensor, keys: DropoutKeys | None) -> Masks | None:
        """Those of `probabilities`, for a kernel that makes them itself; None: nothing is dropped."""
        if keys is None or self.probability == 0.0:
            return None
        return Masks(self.rows_of(query, keys), torch.tensor(self.key(keys)), self.probability)

    def in_kernel(self, keys: DropoutKeys | None) -> float:
        """The probability for a fused kernel; 0 without keys. Seeds the generator of the device, from which the kernel
        draws one mask for all its rows: recompute and resume repeat it, but it depends on the micro-batch size and on
        how heads are sharded."""
        if keys is None or self.probability == 0.0:
            return 0.0
        assert keys.rows is not None
        key, device = random_key(self.key(keys), self.region.rank, *keys.samples), keys.rows.device
        # torch.manual_seed would seed every device
        source = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
        source.manual_seed(key)
        return self.probability

    def key(self, keys: DropoutKeys) -> int:
        """Of the place and the step, as a signed integer."""
        return random_key(keys.seed, keys.step, self.place) - 2**63
