"""Recompute: keep a layer's input only and compute the layer again in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def run_layer(layer: Callable[..., Tensor], hidden: Tensor, *arguments: Any, recompute: bool) -> Tensor:
    """`layer(hidden, *arguments)`, keeping nothing but its inputs for backward if `recompute`.

    Dropout needs no saved generator state: its masks are a function of keys (see `dropout`).
    """
    if not recompute:
        return layer(hidden, *arguments)
    return checkpoint(layer, hidden, *arguments, use_reentrant=False, preserve_rng_state=False)
