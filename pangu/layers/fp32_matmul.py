"""Precisions of fp32 matmuls: those that are exact on this processor, and trials of their speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT = 1e-4
"""Bound of the error of true fp32 matmuls relative to sqrt(inner size); TF32 errs by 1e-3, bf16 by 1e-2."""

MATMUL_TIE = 1.01
"""Tie factor (`pangu.metrics.timing.TIE`) of precisions: matmuls dominate a step, so a few percent count."""


def work_limit(device: torch.device) -> int:
    """Return the multiplications of a trial that takes a few milliseconds, which other processes seldom interrupt."""
    # Shorter trials measure the overhead of a library call, which hid that one precision was faster by a tenth.
    return 2**26 * torch.get_num_threads() if device.type == "cpu" else 2**33


@dataclass(frozen=True)
class MatmulShape:
    """Matmul [rows, inputs] x [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int
    repeats: float = 1
    """Number of such matmuls per micro-batch."""

    def cut(self, limit: int) -> tuple[MatmulShape, float]:
        """Return a smaller, more cubic matmul of at most `limit` multiplications, and how many make up this one."""
        sizes = [self.rows, self.inputs, self.outputs]
        while sizes[0] * sizes[1] * sizes[2] > limit:
            longest = sizes.index(max(sizes))
            sizes[longest] = -(-sizes[longest] // 2)
        smaller = MatmulShape(*sizes)
        work = self.rows * self.inputs * self.outputs / (sizes[0] * sizes[1] * sizes[2])
        return smaller, work * self.repeats


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the fp32 matmul precision in a block, or in a function as its decorator."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_precisions(requested: str, device: torch.device, dtype: torch.dtype, matmul: MatmulShape) -> list[str]:
    """Return the candidates of `torch.set_float32_matmul_precision` for `auto`, or the requested one alone."""
    # `medium` allows bf16, but a CPU without matrix tiles does not use it; torch then calls oneDNN instead of MKL,
    # which may be faster. It is a candidate if `matmul` stays true fp32 with it.
    if requested != "auto":
        return [requested]
    if device.type != "cpu" or dtype != torch.float32:
        return ["highest"]
    return ["highest", "medium"] if _error_of_medium(matmul) < EXACT else ["highest"]


def matmul_trial(matmul: MatmulShape, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward of a linear layer on random numbers."""
    rows, inputs, outputs = matmul.rows, matmul.inputs, matmul.outputs
    x, weight, grad = random(device, dtype, (rows, inputs), (outputs, inputs), (rows, outputs))
    return lambda: (F.linear(x, weight), grad @ weight, grad.t() @ x)


def random(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return normal random tensors from a separate generator, so that the run's generator is not changed."""
    source = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=source, device=device).to(dtype) for shape in shapes]


def _error_of_medium(matmul: MatmulShape) -> float:
    """Return the largest difference that `medium` makes in a linear layer, relative to sqrt(inner size)."""
    # compared with `highest`, not fp64: kernels stay in memory once they have run
    multiply = matmul_trial(matmul, torch.float32, torch.device("cpu"))
    with matmul_precision("highest"):
        exact = multiply()
    with matmul_precision("medium"):
        products = multiply()
    inner = (matmul.inputs, matmul.outputs, matmul.rows)
    differences = zip(exact, products, inner, strict=True)
    return max(float((one - other).abs().max()) / size**0.5 for one, other, size in differences)
