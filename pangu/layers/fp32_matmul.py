"""The precisions of fp32 matmuls: which ones are exact on this processor, and a trial of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT = 1e-4
"""Above the error of true fp32 matmuls, relative to the root of the inner size; TF32 errs by 1e-3, bf16 by 1e-2."""

MATMUL_TIE = 1.01
"""As `pangu.metrics.timing.TIE`, for precisions: matmuls are most of a step, and a few percent hours of a long run."""


def work_limit(device: torch.device) -> int:
    """Multiplications of a trial: a few milliseconds, which another process seldom interrupts. In shorter ones counts
    what a library does for each product, however large: it hid that one was faster by a tenth than the other."""
    return 2**26 * torch.get_num_threads() if device.type == "cpu" else 2**33


@dataclass(frozen=True)
class Matmul:
    """[rows, inputs] times [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int
    repeats: float = 1
    """How often a micro-batch computes as much."""

    def cut(self, limit: int) -> tuple[Matmul, float]:
        """A smaller, more cubic matmul of at most `limit` multiplications, and how many of it make up this one with its
        repeats."""
        sizes = [self.rows, self.inputs, self.outputs]
        while sizes[0] * sizes[1] * sizes[2] > limit:
            longest = sizes.index(max(sizes))
            sizes[longest] = -(-sizes[longest] // 2)
        smaller = Matmul(*sizes)
        work = self.rows * self.inputs * self.outputs / (sizes[0] * sizes[1] * sizes[2])
        return smaller, work * self.repeats


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """For a block, or for a function as its decorator."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_precisions(requested: str, device: torch.device, dtype: torch.dtype, matmul: Matmul) -> list[str]:
    """The values of `torch.set_float32_matmul_precision` that `auto` chooses among; another request is the only one.
    `medium` allows bf16 inside a matmul, but a CPU without matrix tiles does not use it, and torch then calls oneDNN
    instead of MKL. Either may be faster: `medium` is a candidate if `matmul` stays true fp32 with it."""
    if requested != "auto":
        return [requested]
    if device.type != "cpu" or dtype != torch.float32:
        return ["highest"]
    return ["highest", "medium"] if _error_of_medium(matmul) < EXACT else ["highest"]


def matmul_trial(matmul: Matmul, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of a linear layer on random numbers."""
    rows, inputs, outputs = matmul.rows, matmul.inputs, matmul.outputs
    x, weight, grad = random(device, dtype, (rows, inputs), (outputs, inputs), (rows, outputs))
    return lambda: (F.linear(x, weight), grad @ weight, grad.t() @ x)


def random(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers from a separate generator, so that the run's generator stays as it is."""
    source = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=source, device=device).to(dtype) for shape in shapes]


def _error_of_medium(matmul: Matmul) -> float:
    """Largest difference that `medium` makes to a linear layer's forward and backward, relative to the root of the
    inner size. Beside `highest`, not fp64: kernels stay in the process once they have run."""
    multiply = matmul_trial(matmul, torch.float32, torch.device("cpu"))
    with matmul_precision("highest"):
        exact = multiply()
    with matmul_precision("medium"):
        products = multiply()
    inner = (matmul.inputs, matmul.outputs, matmul.rows)
    differences = zip(exact, products, inner, strict=True)
    return max(float((one - other).abs().max()) / size**0.5 for one, other, size in differences)
