"""Turns: the parts of a layer that compute the halves of a micro-batch, one after the other."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class LayerPart(StrEnum):
    """Part of a layer with experts on several ranks, at whose end an exchange starts; others have OUTPUT alone."""

    ATTENTION = "ATTENTION"
    """Attention and router; starts to send tokens to their experts."""
    EXPERTS = "EXPERTS"
    """Waits for the tokens, computes the experts and starts to send back their outputs."""
    OUTPUT = "OUTPUT"
    """Waits for the outputs; the output of the layer."""


class Turn(NamedTuple):
    """Forward pass of a part of a layer for one half of a micro-batch; the backward pass has the opposite order."""

    part: LayerPart
    half: int

    def __str__(self) -> str:
        """Format it like `EXPERTS of half 1`."""
        return f"{self.part} of half {self.half}"
