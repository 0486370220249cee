"""Rotary position embedding (Su et al. 2021, section 3.2): queries and keys turn by angles that grow with position."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotation:
    """The turn of every position: made once for a micro-batch, applied in every layer.

    Element i is paired with i + size / 2, as in GPT-NeoX and transformers' Llama; the paper pairs neighbours, which is
    the same up to the order of the rows of the query and key matrices.
    """

    def __init__(self, positions: Tensor, size: int, base: float, dtype: torch.dtype) -> None:
        """
        Args:
            positions: int64 [batch, sequence], position of each token in its document.
            size: width of a head, an even number.
            base: pair i of a token at position m turns by m x base^(-2i / size).
            dtype: of the model; angles are at least fp32, in which positions stay whole numbers.
        """
        self.dtype = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, size, 2, dtype=self.dtype, device=positions.device) / size
        angles = positions[:, None, :, None] * base**-exponents
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """[batch, heads, sequence, size] -> the same, turned in fp32 and rounded once."""
        first, second = x.to(self.dtype).chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)
