"""Code for CPUs only: precisions of fp32 matmuls, and attention to blocks of keys.

Dropout in blocks that fit a cache is in `dropout_masks`, next to the hash that it shares with accelerators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pangu.layers.attention_blocks import Gradients, Output, Scores, Tile, TileDropout, bias_of
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.metrics.devices import processor_name


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the fp32 matmul precision in a block, or in a function as its decorator."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def precisions(requested: str, compute: str, device: torch.device) -> list[str]:
    """Return the values of `torch.set_float32_matmul_precision` that `precision.fp32_matmul` leaves; `auto`: true fp32.

    MKL does not use AVX-512 on AMD. For `medium` torch calls oneDNN, which does, in down to half of the time, but takes
    several times as long for the attention of small heads. It stays true fp32 on a CPU without bf16 tiles.
    """
    if requested != "auto":
        return [requested]
    is_slow = device.type == "cpu" and compute == "fp32" and "AMD" in processor_name(device)
    return ["highest", "medium"] if is_slow and not torch.cpu._is_amx_tile_supported() else ["highest"]


class CpuBlocks:
    """Blocks with torch's flash attention for CPUs; mask and bias are a matrix, shared by all layers."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare for `terms` of the full sequence."""
        self.terms = terms
        self._made: dict[Tile, Tensor | None] = {}

    def forward(self, part: QKV, block: Tile, drops: TileDropout, scores: Scores) -> Output:
        """Attend to a block of keys; see `Blocks`."""
        whole, is_causal, mask = part.ungrouped(), *self._mask(block)
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *whole, 0.0, is_causal, attn_mask=mask
        )
        if mask is not None:
            log_sum = log_sum.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return Output(output, log_sum)

    def backward(
        self, grad: Tensor, part: QKV, block: Tile, drops: TileDropout, scores: Scores, full: Output, into: Gradients
    ) -> None:
        """Add the gradients of a block; see `Blocks`."""
        is_causal, mask = self._mask(block)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *part.ungrouped(), full.output, full.log_sum, 0.0, is_causal, attn_mask=mask
        )
        for total, gradient in zip(into.of, grads, strict=True):
            total.add_(gradient.unflatten(1, (total.shape[1], -1)).sum(2))

    def _mask(self, block: Tile) -> tuple[bool, Tensor | None]:
        if self.terms.bias is None and self.terms.mask.is_plain_causal and block.query == block.key:
            return True, None
        if block not in self._made:
            self._made[block] = bias_of(self.terms, block, self.terms.dtype)
        return False, self._made[block]
