"""Attention kernels by name."""

from __future__ import annotations

from pangu.layers.gpu_kernels import GPU_KERNELS
from pangu.layers.kernels import Kernel, Reference, Sdpa

KERNELS: dict[str, type[Kernel]] = {"reference": Reference, "sdpa": Sdpa}
"""Kernels that run on every device."""


def kernel_named(name: str) -> type[Kernel]:
    """Return the kernel class of a value of `model.attention`; see `pangu.config.attention` for their abilities."""
    return KERNELS[name] if name in KERNELS else GPU_KERNELS[name]
