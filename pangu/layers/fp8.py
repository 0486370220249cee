"""Matmuls of layers in fp8 with delayed scaling (Micikevicius et al. 2022, section 3; Transformer Engine's recipe).

Inputs and weights are rounded to e4m3, output gradients to e5m2, each tensor times its own scale. A scale is a power of
two, constant within a step. It follows from `amax`, the largest magnitudes of the tensor in the last `HISTORY` steps,
in all micro-batches on all ranks:

    2^(e-1) <= amax < 2^e    ->    scale 2^(8-e) in e4m3 (up to 448), 2^(15-e) in e5m2 (up to 57344)

So a tensor may grow by three quarters before it saturates, and no layout changes a scale: a maximum does not depend on
order, and only the exponent of `amax` counts, which rounding keeps. Scaling by a power of two rounds nothing.
Micro-batches and recomputes use the same scales, so that a weight is cast once a step; both orientations (its own for
y = x Wᵀ, the transpose for dx = dy W) are kept next to it. A step without history, such as the first of a run,
multiplies in the compute format and records magnitudes; validation, evaluation and generation do the same without
recording. Non-finite values become nan, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._triton import has_triton

from pangu.collectives.reduce import Completion, Handle, start_all_reduce
from pangu.common.errors import UserError
from pangu.layers.fp8_blocks import BLOCKS, require_blocks
from pangu.topology.placement import in_fp8
from pangu.topology.recorder import AxisGroup

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")
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
_SCALE_STRIDE = 4
"""Stride of scales in elements: a compiled kernel loads 16 bytes at a time."""
_TILE = (128, 64)
"""Rows and columns that a program of the Triton kernel casts."""


def _rounded(x: Tensor, scale: Tensor, limit: float) -> Tensor:
    wide = x.float()
    # 0 for a finite number, otherwise nan
    return ((wide * scale).clamp(-limit, limit) + 0.0 * wide).to(_FORMATS[limit])


def _update_amax(x: Tensor, amax: Tensor) -> None:
    # by rows first, which a kernel can do while it rounds them
    amax.copy_(torch.maximum(amax, x.abs().amax(-1).amax().float()))


Outs = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Results of a cast: rows, columns and sums over rows; None: not needed."""


def _cast(x: Tensor, scale: Tensor, amax: Tensor, *outs: *Outs) -> None:
    rows, columns, sums = outs
    _update_amax(x, amax)
    value = _rounded(x, scale, _limit(rows, columns))
    for out, source in ((rows, value), (columns, value.t())):
        if out is not None:
            out.copy_(source)
    if sums is not None:
        torch.sum(x, 0, dtype=sums.dtype, out=sums.zero_()[0])


def _limit(rows: Tensor | None, columns: Tensor | None) -> float:
    one = columns if rows is None else rows
    return _E5M2 if one is not None and one.dtype == torch.float8_e5m2 else _E4M3


def cast_by_kernel(x: Tensor, scale: Tensor, amax: Tensor, *outs: *Outs) -> None:
    """Launch the Triton kernel of `cast`."""
    from pangu.layers import fp8_kernels  # noqa: PLC0415 - it imports triton, an optional package

    (height, width), (m, n), (rows, columns, _) = x.shape, _TILE, outs
    programs = -(-height // m) * -(-width // n)
    arguments = x, scale, amax.view(torch.int32), *outs, height, width, _limit(rows, columns), m, n
    fp8_kernels.cast[(programs,)](*arguments, num_warps=8)


def _cast_on_device(x: Tensor, *others: Any) -> None:
    # without Triton, and in fp64, which is for exact comparisons, operators of torch
    (cast_by_kernel if has_triton() and x.dtype != torch.float64 else _cast)(x, *others)


_LIBRARY.define(
    "fp8_cast(Tensor x, Tensor scale, Tensor(a!) amax, Tensor(b!)? rows, Tensor(c!)? columns, Tensor(d!)? sums) -> ()"
)
_LIBRARY.impl("fp8_cast", _cast, "CPU")
_LIBRARY.impl("fp8_cast", _cast_on_device, "CompositeExplicitAutograd")
torch.library.register_fake("pangu::fp8_cast", lambda *_: None, lib=_LIBRARY)
cast = torch.ops.pangu.fp8_cast.default
"""Operator that scales x [rows, columns] and casts it to `rows` and, transposed, to `columns`, reading x once.

It raises `amax` to the largest magnitude. `sums` [parts, columns] receives the sums of x over parts of its rows.
"""


class Operands(NamedTuple):
    """Tensor [rows, columns] as its matmuls and the bias gradient need it; itself in place of what none needs."""

    rows: Tensor
    columns: Tensor
    """Transpose of `rows`: hardware needs the dimension that is summed over contiguous."""
    sums: Tensor
    """Sums over parts of the rows, [parts, columns]."""


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, four times as fast on a CPU."""
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).to(dtype)
    return table.index_select(0, x.view(torch.uint8).view(-1).int()).view(x.shape)


def scaled_matmul(
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
class Fp8Matmuls:
    """Fp8 matmuls of one matrix [outputs, inputs]."""

    scales: Fp8Scales
    first: int
    """Index of its input among the tensors of all matrices."""

    @property
    def casts_once(self) -> bool:
        """True if the scales are known, and a tensor is cast for both of its matmuls; else these are not in fp8."""
        return self.scales.known

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return a function that computes x Wᵀ + b for x [rows, inputs], which may have been cast."""
        if not self.casts_once:
            _update_amax(weight, self.scales.amax[self.first + _WEIGHT])
        return self._multiply(_INPUT, weight, partial(self._weight, weight, 0), bias)

    def input_gradient(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes dy W for dy [rows, outputs], which may have been cast."""
        return self._multiply(_GRADIENT, weight.t(), partial(self._weight, weight, 1))

    def _multiply(
        self, which: int, matrix: Tensor, in_fp8: Callable[[], Tensor], bias: Tensor | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies rows by `matrix` transposed, casting the latter at the first call."""

        # late, so that the cast overlaps the gather of rows
        def multiply(rows: Tensor) -> Tensor:
            if not self.casts_once:
                _update_amax(rows, self.scales.amax[self.first + which])
                return F.linear(rows, matrix, bias)
            rows = rows.contiguous() if rows.itemsize == 1 else self._cast(rows, which, columns=False).rows
            return scaled_matmul(rows, in_fp8(), self._inverses(which, _WEIGHT), matrix.dtype, bias)

        return multiply

    def input(self, x: Tensor, rows: bool = True) -> Operands:
        """Cast x [rows, inputs] for y = x Wᵀ, unless only `columns` is needed, and for dW = dyᵀ x."""
        return self._cast(x, _INPUT, rows=rows)

    def gradient(self, grad: Tensor, sums: bool) -> Operands:
        """Cast dy [rows, outputs] for dx = dy W and for dW = dyᵀ x, with sums over rows for the bias if asked for."""
        return self._cast(grad, _GRADIENT, sums=sums)

    def weight_gradient(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dyᵀ x from dyᵀ [outputs, rows] and xᵀ [inputs, rows], both cast."""
        return scaled_matmul(left, right, self._inverses(_GRADIENT, _INPUT), dtype)

    def add_weight_gradient(self, total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
        """Add `weight_gradient` to a sum in fp32 or fp64, or overwrite the sum if this `begins` it."""
        # The kernel cannot add: further results are written (4 bytes), read, and added to a sum that is read and
        # written. A 16-bit result would save 4 of the 16 bytes, but it would be rounded before it is added.
        aligned = total.storage_offset() * total.itemsize % 16 == 0
        if begins and aligned and total.dtype == torch.float32 and total.device.type != "cpu":
            torch._scaled_mm(left, right.t(), *self._inverses(_GRADIENT, _INPUT), out_dtype=total.dtype, out=total)
        else:
            (total.copy_ if begins else total.add_)(self.weight_gradient(left, right, total.dtype))

    def _cast(self, x: Tensor, which: int, rows: bool = True, columns: bool = True, sums: bool = False) -> Operands:
        dtype, wide = _FORMATS[_E5M2 if which == _GRADIENT else _E4M3], torch.promote_types(x.dtype, torch.float32)
        parts = 1 if x.device.type == "cpu" else -(-x.shape[0] // _TILE[0])
        outs = (
            x.new_empty(x.shape, dtype=dtype) if rows else None,
            x.new_empty(x.shape[::-1], dtype=dtype) if columns else None,
            x.new_empty(parts, x.shape[1], dtype=wide) if sums else None,
        )
        cast(x.detach(), self.scales.scale[self.first + which], self.scales.amax[self.first + which], *outs)
        return Operands(*(x if out is None else out for out in outs))

    def _weight(self, weight: Tensor, place: int) -> Tensor:
        """Return the weight (`place` 0) or its transpose (1), cast at the first call with these values and scales."""
        scales, at, casts = self.scales, self.first + _WEIGHT, self.scales.kept.get(self.first)
        if casts is None:
            casts = scales.kept[self.first] = self._cast(weight, _WEIGHT)[:2]
            scales.fresh.add(self.first)
        elif self.first not in scales.fresh:
            cast(weight.detach(), scales.scale[at], scales.amax[at], *casts, None)
            scales.fresh.add(self.first)
        return casts[place]

    def _inverses(self, one: int, other: int) -> tuple[Tensor, Tensor]:
        return self.scales.inverse[self.first + one], self.scales.inverse[self.first + other]


class Fp8Scales:
    """Scales of the tensors of all matrices of the layers, on the device and equal on every rank."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Start without history, for `shapes` of all logical tensors; stacked ones share the first one's name."""
        self._names = [name for name, shape in shapes.items() if in_fp8(name, shape)]
        shape = (len(_EXPONENTS) * len(self._names), _SCALE_STRIDE)
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
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Cast of each matrix and its transpose, by the index of its input."""
        self.fresh: set[int] = set()
        """Matrices whose casts in `kept` are those of their values and scales."""

    def of(self, name: str) -> Fp8Matmuls:
        """Return the fp8 matmuls of the matrix of this name."""
        return Fp8Matmuls(self, len(_EXPONENTS) * self._names.index(name))

    def keep(self, buffers: Mapping[str, tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Keep the casts of matrices (by name) in these buffers; return a function to call when the values change."""
        kept = {self.of(name).first: casts for name, casts in buffers.items()}
        self.kept |= kept
        return partial(self.fresh.difference_update, kept)

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

    def forget_step(self) -> None:
        """Forget the magnitudes of a failed step; weights are cast again, which records theirs."""
        self.amax.zero_()
        self.fresh.clear()

    def _set(self) -> None:
        top = self._history.amax(0)
        # biased exponents as in fp32, where 127 means 1
        scale = (self._targets + 253 - top).clamp(1, 253).where(top > 0, self._unknown)
        self.scale.copy_((scale << 23).view(torch.float32))
        self.inverse.copy_((254 - scale << 23).view(torch.float32))
        self.fresh.clear()
        self.known = True

    def reset(self) -> None:
        """Forget all magnitudes: the next step multiplies in the compute format."""
        self.amax.zero_()
        self._history.zero_()
        self.fresh.clear()
        self.known = False

    def state(self) -> dict[str, list[list[int]]] | None:
        """Return exponents by matrix name, for a checkpoint."""
        tensors = self._history.t().unflatten(0, (len(self._names), len(_EXPONENTS))).tolist()
        return dict(zip(self._names, tensors, strict=True)) if self.known else None

    def restore(self, path: Path, state: Mapping[str, Sequence[Sequence[int]]] | None) -> None:
        """Restore the history of the checkpoint at `path` (None: start empty); raise `UserError` if incomplete."""
        self.reset()
        if state is not None:
            if missing := [name for name in self._names if name not in state]:
                raise UserError(f"{path / 'index.json'}: damaged: no fp8 scaling history of {', '.join(missing[:3])}")
            rows = [row for name in self._names for row in state[name]]
            self._history.copy_(torch.tensor(rows, dtype=torch.int32).t())
            self._set()


def require_fp8(compute: str, device: torch.device, matmul: str = "fp8") -> str:
    """Describe how a device multiplies in a format of `precision.matmul`; raise `UserError` if it cannot."""
    if device.type == "cpu" or compute == "fp64":
        return "emulated: the same results as on a device, but slower than without fp8"
    module: Any = torch.get_device_module(device)
    capability = module.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else (0, 0)
    if capability < (8, 9):
        name = module.get_device_name(device)
        raise UserError(
            f"precision.matmul = {matmul}: {name} has no fp8 matmuls (NVIDIA GPUs have them from compute capability "
            "8.9 on: Ada, Hopper, Blackwell); set precision=bf16"
        )
    return require_blocks(matmul, device) if matmul in BLOCKS else "torch._scaled_mm, accumulated in fp32"
