"""Dropout whose masks are a function of (seed, step, place, sample), so neither layout nor recompute changes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.layers.builder import Builder
from pangu.topology.random import random_key


@dataclass(frozen=True)
class DropoutKeys:
    """Keys of the masks of one micro-batch."""

    seed: int
    step: int
    samples: tuple[int, ...]
    """Global index of each row of the micro-batch."""


class Dropout(nn.Module):
    """Zeroes each element with `probability` and scales the others by 1 / (1 - probability) (Srivastava et al. 2014). A
    rank with a shard of a tensor draws the mask of the whole, so masks do not depend on the number of ranks."""

    def __init__(self, build: Builder, probability: float, name: str, batch_dim: int, shared_dim: int | None) -> None:
        """`name` is unique below the path of `build`. `batch_dim` runs over the samples; `shared_dim` is sharded over
        the tensor-parallel ranks (None: replicated)."""
        super().__init__()
        self.probability = probability
        self.place = build.at(name).path
        self.batch_dim = batch_dim
        self.shared_dim = shared_dim
        self.region = build.region

    def forward(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Any shape -> the same. `keys` is None in evaluation: no dropout."""
        if keys is None or self.probability == 0.0:
            return x
        dropped = torch.stack([self._mask(x, keys, sample) for sample in keys.samples], self.batch_dim)
        return x.masked_fill(dropped, 0.0) * (1.0 / (1.0 - self.probability))

    def in_kernel(self, keys: DropoutKeys | None) -> float:
        """The probability for a fused kernel; 0 without keys. Seeds torch's default generators, from which it draws one
        mask for all its rows: recompute and resume repeat it, but it depends on the micro-batch size and on how heads
        are sharded."""
        if keys is None or self.probability == 0.0:
            return 0.0
        place = f"{self.place}, rank {self.region.rank}"
        torch.manual_seed(random_key(keys.seed, keys.step, place, *keys.samples))
        return self.probability

    def _mask(self, x: Tensor, keys: DropoutKeys, sample: int) -> Tensor:
        shape = list(x.shape)
        if self.shared_dim is not None:
            shape[self.shared_dim] *= self.region.size
        del shape[self.batch_dim]
        source = torch.Generator(x.device).manual_seed(random_key(keys.seed, keys.step, self.place, sample))
        dropped = torch.rand(shape, generator=source, device=x.device) < self.probability
        if self.shared_dim is None:
            return dropped
        dim = self.shared_dim - (self.shared_dim > self.batch_dim)
        return dropped.chunk(self.region.size, dim)[self.region.rank]


def hidden_dropout(build: Builder, probability: float, name: str) -> Dropout:
    """Dropout of hidden states [sequence (/ ranks with sequence parallelism), batch, hidden]."""
    return Dropout(build, probability, name, batch_dim=1, shared_dim=0 if build.region.slices_sequence else None)
