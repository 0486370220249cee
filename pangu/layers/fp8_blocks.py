"""Matmuls of layers in fp8 with a scale per block of each tensor, from its own values: no history, no first step.

`fp8_blockwise`: blocks of 1 x 128 along the sum for inputs and gradients, of 128 x 128 for weights (DeepSeek-V3 2024,
section 3.3). `mxfp8`: blocks of 32 along the sum (OCP Microscaling Formats 1.0, section 6.3). All values are e4m3, all
scales powers of two. Sums over tokens go sample by sample, so that no block depends on `batch.micro_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.common.errors import UserError
from pangu.layers.fused import fused


class CastBlocks(NamedTuple):
    """Matrix in e4m3, contiguous in rows as hardware needs it, with the scale of each block."""

    values: Tensor
    exponents: Tensor
    """Exponents of the factors that restore the values, biased as in fp32, int32 [rows / height, columns / width]."""

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `dtype`, which rounds nothing."""
        (rows, columns), (down, across) = self.values.shape, self.exponents.shape
        factors = (self.exponents << 23).view(torch.float32).to(dtype)[:, None, :, None]
        parts = self.values.to(dtype).view(down, rows // down, across, columns // across)
        return (parts * factors).view(rows, columns)


def _cast(x: Tensor, height: float, width: float, saturates: float) -> tuple[Tensor, Tensor]:
    parts = x.float().unflatten(1, (-1, int(width))).unflatten(0, (-1, int(height)))
    bits = parts.abs().amax((1, 3)).view(torch.int32)
    # amax = m 2^e is divided by 2^(e-8), or by 2^(e-7) if m 2^8 is above 448
    rounds_up = 0 if saturates else (bits & 0x7FFFFF > 0x600000).int()
    exponents = ((bits >> 23) - 8 + rounds_up).clamp(1, 253)
    scaled = parts * (254 - exponents << 23).view(torch.float32)[:, None, :, None]
    # 0 for a finite number, otherwise nan
    values = scaled.clamp(-448.0, 448.0) + 0.0 * parts
    return values.view(x.shape).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format), exponents


def _like_cast(x: Tensor, height: float, width: float, saturates: float) -> tuple[Tensor, Tensor]:
    blocks = x.shape[0] // int(height), x.shape[1] // int(width)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(blocks, dtype=torch.int32)


# floats, since `fused` compiles a kernel for each of their values
_cast_blocks = fused(
    "fp8_cast_blocks(Tensor x, float height, float width, float saturates) -> (Tensor, Tensor)", _cast, _like_cast
)


@dataclass(frozen=True)
class BlockScaledMatmuls:
    """Fp8 matmuls of any matrix with a scale per block."""

    width: int
    """Elements of a block along the sum."""
    height: int
    """Rows of a block of a weight."""
    saturates: bool
    """True if the largest element of a block may be cut off, by an eighth at most: MX has the exponent of its power."""
    casts_once = False
    """Each matmul casts its operands."""

    def of(self, name: str) -> BlockScaledMatmuls:
        """Return the matmuls of a matrix."""
        return self

    def cast(self, x: Tensor, height: int = 1) -> CastBlocks:
        """Cast a matrix, whose columns are summed over, in blocks of `height` rows."""
        return CastBlocks(*_cast_blocks(x.detach(), float(height), float(self.width), float(self.saturates)))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return a function that computes x Wᵀ + b for x [rows, inputs]."""
        operand = cache(partial(self.cast, weight, self.height))
        return lambda rows: self._matmul(self.cast(rows), operand(), rows.dtype, bias)

    def input_gradient(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes dy W for dy [rows, outputs]."""
        return self.linear(weight.t(), None)

    def weight_gradient(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dyᵀ x from dyᵀ [outputs, rows] and x [rows, inputs]."""
        return self._matmul(self.cast(left), self.cast(right.t()), dtype)

    def add_weight_gradient(self, total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
        """Add `weight_gradient` to a sum, or overwrite the sum if this `begins` it."""
        (total.copy_ if begins else total.add_)(self.weight_gradient(left, right, total.dtype))

    def _matmul(self, left: CastBlocks, right: CastBlocks, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Return left [m, k] x right [n, k] transposed + bias [n], accumulated in fp32 (fp64 in fp64)."""
        if left.values.device.type == "cpu" or dtype == torch.float64:
            wide = torch.promote_types(dtype, torch.float32)
            value = F.linear(left.restored(wide), right.restored(wide)).to(dtype)
        else:
            scales, recipes = zip(*(self._for_kernel(one) for one in (left, right)), strict=True)
            swizzle = F.SwizzleType.SWIZZLE_32_4_4 if self.saturates else F.SwizzleType.NO_SWIZZLE
            value = F.scaled_mm(
                left.values, right.values.t(), scales[0], recipes[0], scales[1], recipes[1], swizzle, swizzle,
                output_dtype=dtype,
            )  # fmt: skip
        return value if bias is None else value + bias

    def _for_kernel(self, one: CastBlocks) -> tuple[Tensor, Any]:
        """Return the scales in the order of torch's kernel, and their kind."""
        rows, across = one.exponents.shape
        if self.saturates:  # in tiles of 128 x 4, each as 32 x 16
            tiles = F.pad(one.exponents.to(torch.uint8), (0, -across % 4, 0, -rows % 128))
            tiles = tiles.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
            return tiles.flatten().view(torch.float8_e8m0fnu), F.ScalingType.BlockWise1x32
        scales = (one.exponents << 23).view(torch.float32)
        if rows == one.values.shape[0]:
            return scales.t().contiguous().t(), F.ScalingType.BlockWise1x128
        return F.pad(scales, (0, -across % 4)).t(), F.ScalingType.BlockWise128x128


BLOCKS = {
    "fp8_blockwise": BlockScaledMatmuls(width=128, height=128, saturates=False),
    "mxfp8": BlockScaledMatmuls(width=32, height=1, saturates=True),
}
"""Matmuls by `precision.matmul`."""


def by_sample(left: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return dyᵀ [outputs, rows] and x [sequence, batch, inputs] as [rows, inputs], both sorted by sample."""
    return left.unflatten(1, x.shape[:2]).transpose(1, 2).flatten(1), x.transpose(0, 1).flatten(0, 1)


def require_blocks(matmul: str, device: torch.device) -> str:
    """Describe how a CUDA device multiplies in fp8 with a scale per block; raise `UserError` if it cannot."""
    major = torch.cuda.get_device_capability(device)[0]
    if not (major == 9 if matmul == "fp8_blockwise" else major in (10, 11)):
        needed = "Hopper (9.0)" if matmul == "fp8_blockwise" else "Blackwell (10.0)"
        raise UserError(
            f"precision.matmul = {matmul}: {torch.cuda.get_device_name(device)} lacks such matmuls; they need a GPU of "
            f"compute capability {needed}; set precision=fp8, or precision=bf16"
        )
    return f"torch.nn.functional.scaled_mm, {matmul}"
