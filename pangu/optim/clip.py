"""Gradient clipping."""

from __future__ import annotations


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor that brings a gradient of this norm to at most `limit` (Pascanu et al. 2013, Algorithm 1)."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
