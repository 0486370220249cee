"""Dropout whose masks are a function of (seed, step, place, sample), so neither layout nor recompute changes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.topology.random import random_key


@dataclass(frozen=True)
class DropoutKeys:
    """What the masks of one micro-batch depend on."""

    seed: int
    step: int
    samples: tuple[int, ...]
    """Global index of each row of the micro-batch."""

    def seed_kernel(self, place: str) -> None:
        """Seed torch's default generators for a fused kernel that draws its own mask.

        Such a mask is the same in every recompute and after a resume, but it depends on how samples are grouped into
        micro-batches: a fused kernel draws one mask for all its rows.
        """
        torch.manual_seed(random_key(self.seed, self.step, place, *self.samples))


def dropout(x: Tensor, probability: float, keys: DropoutKeys | None, place: str, batch_dim: int = 1) -> Tensor:
    """Zero each element with `probability` and scale the others by 1 / (1 - probability) (Srivastava et al. 2014).

    Args:
        x: any shape; its rows along `batch_dim` belong to `keys.samples`.
        keys: None in evaluation, where nothing is dropped.
        place: name of this dropout, unique in the model.
    """
    if keys is None or probability == 0.0:
        return x
    shape = [size for dim, size in enumerate(x.shape) if dim != batch_dim]
    masks = []
    for sample in keys.samples:
        source = torch.Generator(x.device).manual_seed(random_key(keys.seed, keys.step, place, sample))
        masks.append(torch.rand(shape, generator=source, device=x.device) < probability)
    return x.masked_fill(torch.stack(masks, batch_dim), 0.0) * (1.0 / (1.0 - probability))
