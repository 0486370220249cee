"""Matmuls of layers in fp8 with delayed scaling (Micikevicius et al. 2022, section 3; Transformer Engine's recipe).

Inputs and weights are rounded to e4m3, output gradients to e5m2, each tensor times its own scale. A scale is a power of
two, constant within a step. It follows from `amax`, the largest magnitudes of the tensor in the last `HISTORY` steps,
in all micro-batches on all ranks:

    2^(e-1) <= amax < 2^e    ->    scale 2^(8-e) in e4m3 (up to 448), 2^(15-e) in e5m2 (up to 57344)

So a tensor may grow by three quarters before it saturates, and no layout changes a scale: a maximum does not depend on
order, and only the exponent of `amax` counts, which rounding keeps. Scaling by a power of two rounds nothing.
Micro-batches and recomputes use the same scales. A step without history, such as the first of a run, multiplies in the
compute format and records magnitudes; validation, evaluation and generation do the same without recording. Non-finite
values become nan, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.reduce import Completion, Handle, start_all_reduce
from pangu.common.errors import UserError
from pangu.layers.fused import fused
from pangu.topology.recorder import AxisGroup

HISTORY = 16
"""Number of steps whose magnitudes are kept."""
_E4M3, _E5M2 = 448.0, 57344.0
_FORMATS = {_E4M3: torch.float8_e4m3fn, _E5M2: torch.float8_e5m2}
_INPUT, _WEIGHT, _GRADIENT = range(3)
"""Indices of the tensors of a matrix: its input, itself, and its output gradient."""
_EXPONENTS = (8, 8, 15)
"""Exponents of the powers of two that bound the scaled magnitudes."""
_UNKNOWN = (127, 127, 127 + 24)
"""Exponents (biased as in fp32) of scales without history; gradients of a mean over tokens are small."""
_APART = 4
"""Stride of scales in elements: a compiled kernel loads 16 bytes at a time."""


def _rounded(x: Tensor, scale: Tensor, limit: float) -> Tensor:
    wide = x.float()
    # 0 for a finite number, otherwise nan
    return ((wide * scale).clamp(-limit, limit) + 0.0 * wide).to(_FORMATS[limit])


def _note(x: Tensor, amax: Tensor) -> None:
    # by rows first, which a kernel can do while it rounds them
    amax.copy_(torch.maximum(amax, x.abs().amax(-1).amax().float()))


def _cast(x: Tensor, scale: Tensor, amax: Tensor, limit: float) -> Tensor:
    _note(x, amax)
    return _rounded(x, scale, limit)


def _cast_columns(x: Tensor, scale: Tensor, limit: float) -> Tensor:
    return _rounded(x, scale, limit).t().contiguous()


cast = fused(
    "fp8_cast(Tensor x, Tensor scale, Tensor(a!) amax, float limit) -> Tensor",
    _cast,
    lambda x, scale, amax, limit: torch.empty(x.shape, dtype=_FORMATS[limit], device=x.device),
)
"""Operator that scales [rows, columns], casts to the format of `limit`, and raises `amax` to the largest magnitude."""
cast_columns = fused(
    "fp8_cast_columns(Tensor x, Tensor scale, float limit) -> Tensor",
    _cast_columns,
    lambda x, scale, limit: torch.empty(x.shape[::-1], dtype=_FORMATS[limit], device=x.device),
)
"""Operator like `cast` that transposes to [columns, rows]: hardware needs the inner dimension contiguous."""


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, four times as fast on a CPU."""
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).to(dtype)
    return table.index_select(0, x.view(torch.uint8).view(-1).int()).view(x.shape)


def product(
    left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return left [m, k] x right [n, k] transposed, times the inverse scales, + bias [n], accumulated in fp32."""
    # On a CPU, and in fp64 everywhere, fp8 values are multiplied in fp32 or fp64.
    if left.device.type == "cpu" or dtype == torch.float64:
        wide = torch.promote_types(dtype, torch.float32)
        value = F.linear(_widened(left, wide), _widened(right, wide)) * (inverses[0] * inverses[1]).to(wide)
        return (value if bias is None else value + bias).to(dtype)
    fits = bias is not None and dtype == torch.bfloat16  # the kernel supports no other bias
    value = torch._scaled_mm(
        left, right.t(), *inverses, bias=bias if fits else None, out_dtype=dtype, use_fast_accum=False
    )
    return value if bias is None or fits else value + bias


@dataclass(frozen=True)
class Fp8Products:
    """Fp8 matmuls of one matrix [outputs, inputs]."""

    scales: Fp8Scales
    first: int
    """Index of its input among the tensors of all matrices."""

    @property
    def known(self) -> bool:
        """True if the scales are known; otherwise matmuls use the compute format."""
        return self.scales.known

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return a function that computes x Wᵀ + b for x [rows, inputs]."""
        if not self.known:
            _note(weight, self.scales.amax[self.first + _WEIGHT])
        return self._multiply(_INPUT, weight, partial(self._cast, weight, _WEIGHT), bias)

    def input_gradient(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes dy W for dy [rows, outputs]."""
        return self._multiply(_GRADIENT, weight.t(), partial(self._columns, weight, _WEIGHT))

    def _multiply(
        self, which: int, matrix: Tensor, in_fp8: Callable[[], Tensor], bias: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies rows by `matrix` transposed, casting the latter at the first call."""
        # late, so that the cast overlaps the gather of rows
        operand = cache(in_fp8)

        def multiply(rows: Tensor) -> Tensor:
            if not self.known:
                _note(rows, self.scales.amax[self.first + which])
                return F.linear(rows, matrix, bias)
            return product(self._cast(rows, which), operand(), self._inverses(which, _WEIGHT), rows.dtype, bias)

        return multiply

    def weight_gradient(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dyᵀ x from dyᵀ [outputs, rows] and x [rows, inputs], whose magnitudes are already recorded."""
        grad, x = self._columns(left.t(), _GRADIENT), self._columns(right, _INPUT)
        return product(grad, x, self._inverses(_GRADIENT, _INPUT), dtype)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
        """Add dyᵀ x to a sum, or overwrite the sum if this `begins` it."""
        # The kernel cannot accumulate, so the result is written once and read again.
        (total.copy_ if begins else total.add_)(self.weight_gradient(left, right, total.dtype))

    def _cast(self, x: Tensor, which: int) -> Tensor:
        place, limit = self.first + which, _E5M2 if which == _GRADIENT else _E4M3
        return cast(x, self.scales.scale[place], self.scales.amax[place], limit)

    def _columns(self, x: Tensor, which: int) -> Tensor:
        return cast_columns(x, self.scales.scale[self.first + which], _E5M2 if which == _GRADIENT else _E4M3)

    def _inverses(self, one: int, other: int) -> tuple[Tensor, Tensor]:
        return self.scales.inverse[self.first + one], self.scales.inverse[self.first + other]


class Fp8Scales:
    """Scales of the tensors of all matrices of the layers, on the device and equal on every rank."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Start without history, for `shapes` of all logical tensors; stacked ones share the first one's name."""
        self._names = [name for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2]
        shape = (len(_EXPONENTS) * len(self._names), _APART)
        self.scale, self.inverse = (torch.ones(shape, device=device)[:, 0] for _ in range(2))
        self.amax = torch.zeros(shape, device=device)[:, 0]
        """Largest magnitude of each tensor in this step on this rank."""
        self._history = torch.zeros(HISTORY, shape[0], dtype=torch.int32, device=device)
        """Biased exponents of `amax` (e + 126) per step, at step modulo `HISTORY`; 0: none (zero or non-finite)."""
        per_tensor = (torch.tensor(each * len(self._names)) for each in (_EXPONENTS, _UNKNOWN))
        self._targets, self._unknown = (each.to(device, torch.int32) for each in per_tensor)
        self._arriving: tuple[Tensor, Handle] = self._targets, Completion()
        self.known = False
        """True if there is a history."""

    def of(self, name: str) -> Fp8Products:
        """Return the fp8 matmuls of the matrix of this name."""
        return Fp8Products(self, len(_EXPONENTS) * self._names.index(name))

    def start_update(self, everyone: AxisGroup | None) -> None:
        """Start to reduce this rank's magnitudes of a step over all ranks."""
        # as integer exponents, since nan has no place in an order
        exponents = self.amax.view(torch.int32) >> 23 & 255
        self._arriving = exponents, start_all_reduce(exponents, everyone, largest=True)

    def finish_update(self, step: int) -> None:
        """Compute the scales of the steps after `step`."""
        exponents, handle = self._arriving
        handle.wait()
        self._history[step % HISTORY] = exponents.masked_fill(exponents == 255, 0)  # inf or nan
        self.amax.zero_()
        self._set()

    def _set(self) -> None:
        top = self._history.amax(0)
        # biased exponents as in fp32, where 127 means 1
        scale = (self._targets + 253 - top).clamp(1, 253).where(top > 0, self._unknown)
        self.scale.copy_((scale << 23).view(torch.float32))
        self.inverse.copy_((254 - scale << 23).view(torch.float32))
        self.known = True

    def reset(self) -> None:
        """Forget all magnitudes: the next step multiplies in the compute format."""
        self.amax.zero_()
        self._history.zero_()
        self.known = False

    def state(self) -> dict[str, list[list[int]]] | None:
        """Return exponents by matrix name, for a checkpoint."""
        tensors = self._history.t().unflatten(0, (len(self._names), len(_EXPONENTS))).tolist()
        return dict(zip(self._names, tensors, strict=True)) if self.known else None

    def restore(self, path: Path, state: Mapping[str, Sequence[Sequence[int]]] | None) -> None:
        """Restore the history of the checkpoint at `path` (None: start anew); raise `UserError` if incomplete."""
        self.reset()
        if state is not None:
            if missing := [name for name in self._names if name not in state]:
                raise UserError(f"{path / 'index.json'}: damaged: no fp8 scaling history of {', '.join(missing[:3])}")
            rows = [row for name in self._names for row in state[name]]
            self._history.copy_(torch.tensor(rows, dtype=torch.int32).t())
            self._set()


def require_fp8(compute: str, device: torch.device) -> str:
    """Describe how a device multiplies in fp8; raise `UserError` if it cannot."""
    if device.type == "cpu" or compute == "fp64":
        return "emulated: the results of a device, but slower than without fp8"
    module: Any = torch.get_device_module(device)
    capability = module.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else (0, 0)
    if capability < (8, 9):
        name = module.get_device_name(device)
        raise UserError(
            f"precision.matmul = fp8: {name} has no fp8 matmuls (NVIDIA GPUs have them from compute capability "
            "8.9 on: Ada, Hopper, Blackwell); set precision=bf16"
        )
    return "torch._scaled_mm, accumulated in fp32"
