"""How the processor computes fp32 products."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 1e-4
"""Above the error of true fp32 products, relative to the root of the inner size; TF32 errs by 1e-3, bf16 by 1e-2."""


def choose_fp32_products(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """What `auto` stands for, in the words of `torch.set_float32_matmul_precision`; other requests are returned.

    `medium` allows bf16 inside a product. A CPU without matrix tiles does not make use of it, but torch then calls
    oneDNN instead of MKL, which is about twice as fast on AMD's processors. So it is tried out: `medium` if products
    stay true fp32, otherwise `highest`.
    """
    if requested != "auto":
        return requested
    if device.type != "cpu" or dtype != torch.float32:
        return "highest"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    exact = _products_error() < EXACT
    torch.set_float32_matmul_precision(before)
    return "medium" if exact else "highest"


def _products_error() -> float:
    """Largest error of a linear layer's products, forward and backward, relative to the root of the inner size."""
    x, weight, grad = torch.randn(3, 512, 512, generator=torch.Generator().manual_seed(0))

    def error(left: Tensor, right: Tensor) -> float:
        return float((left @ right - left.double() @ right.double()).abs().max()) / 512**0.5

    return max(error(x, weight.t()), error(grad, weight), error(grad.t(), x))
