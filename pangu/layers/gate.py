"""What a model tells whoever keeps its parameters: which of them it is about to use and which it has used."""

from __future__ import annotations

from torch import Tensor


class Gate:
    """Stands before and behind every region of a model: `position_bias`, `embedding`, `layers.NUMBER`, and `head` for
    all behind the layers. They follow one another. This one lets everything pass: the parameters are always there."""

    def before(self, region: str, x: Tensor) -> Tensor:
        """The region's input, about to be used; its gradient, in backward, says that the region is done."""
        return x

    def after(self, region: str, x: Tensor) -> Tensor:
        """The region's output; its gradient, in backward, says that the region is about to be used again."""
        return x
