"""Global gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all elements of all tensors, a scalar on their device; not finite if any element is not."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))


def clip_factor(norm: float, limit: float | None) -> float:
    """Factor that brings a gradient of this norm to at most `limit` (Pascanu et al. 2013, Algorithm 1)."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
