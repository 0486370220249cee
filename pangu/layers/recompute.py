"""Recompute: keep the inputs of a computation only and do it again in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def checkpointed(compute: Callable[..., Result], *arguments: Any, on: bool = True) -> Result:
    """`compute(*arguments)`, keeping nothing but its inputs for backward if `on`.

    The second computation ends with the last tensor that backward needs, so a product at the end is not repeated.
    Dropout needs no saved generator state: its masks are a function of keys (see `dropout`).
    """
    if not on:
        return compute(*arguments)
    return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
