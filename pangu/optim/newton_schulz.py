"""Orthogonalization of matrices by Newton-Schulz iterations (Jordan et al. 2024, "Muon")."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from pangu.config.optimizer import matrices_at_once

COEFFICIENTS = 3.4445, -4.775, 2.0315
"""Factors of x, x³ and x⁵: singular values end between 0.7 and 1.2, after few steps also those that were small."""
SMALLEST = 1e-7
"""Smallest norm that a matrix is divided by."""


def _orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return approximately U Vᵀ of each U S Vᵀ in `matrices` [count, rows, columns], which are overwritten."""
    # batched also for one matrix: the result of a matrix must not depend on how many there are
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    del matrices  # free it after the first iteration
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x.div_(norms.clamp_(min=SMALLEST))
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if is_tall else x


def orthogonalize(matrices: Sequence[Tensor], steps: int, dtype: torch.dtype | None = None) -> None:
    """Orthogonalize matrices in place, computed in `dtype` (None: theirs) for many of a shape at once."""
    shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        shapes[matrix.shape].append(matrix)
    for shape, alike in shapes.items():
        # on CPUs, bits of matmuls depend on how many there are and on where each begins
        many = 1 if alike[0].device.type == "cpu" else matrices_at_once(shape)
        for some in (alike[start : start + many] for start in range(0, len(alike), many)):
            # without a name, as results must not live on while the next ones are computed
            torch._foreach_copy_(some, _orthogonalized(torch.stack(some).to(dtype or some[0].dtype), steps).unbind())


def scale_of(shape: Sequence[int], rule: str) -> float:
    """Return the factor on the update of a matrix, as `MuonConfig.adjust_lr`."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
