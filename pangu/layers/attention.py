"""Multi-head attention (Vaswani et al. 2017, section 3.2) between the projections, and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.kernels import QKV, Kernel
from pangu.layers.recompute import checkpointed


class AttentionCore:
    """Attention without parameters, by a given kernel: softmax(q kᵀ / sqrt(head size) + bias) v."""

    # Heads are independent: a tensor-parallel rank computes its share of them without communication.
    def __init__(
        self, build: Builder, dropout_probability: float, recompute: bool = False, residual_scores: bool = False
    ) -> None:
        """Prepare attention; `recompute`: save queries, keys and values only (Korthikanti et al. 2022, section 5)."""
        # `residual_scores`: return the scores, for the layer above
        self.recompute, self.residual_scores = recompute, residual_scores
        self.dropout = Dropout(build, dropout_probability, "probabilities")

    def __call__(
        self,
        qkv: QKV,
        kernel: Kernel,
        keys: DropoutKeys | None,
        below: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the kernel, and the scores if the next layer adds them; see `Kernel`."""
        output, scores = checkpointed(kernel, qkv, self.dropout, keys, below, sinks, on=self.recompute)
        assert scores is not None or not self.residual_scores
        return output, scores if self.residual_scores else None


def split_heads(x: Tensor, size: int) -> Tensor:
    """Split [sequence, batch, heads x size] into [batch, heads, sequence, size]; heads are contiguous in the width."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size).permute(1, 2, 0, 3)


def split_projections(stacked: Tensor, widths: Sequence[int], size: int) -> tuple[Tensor, ...]:
    """Split [sequence, batch, sum of `widths`] into the heads of each projection, as `split_heads` does."""
    split = stacked.view(*stacked.shape[:-1], stacked.shape[-1] // size, size).permute(1, 2, 0, 3)
    return split.split_with_sizes([width // size for width in widths], 1)


def stack_projections(heads: Sequence[Tensor], apart: bool = True) -> Tensor:
    """Undo `split_projections`, without a copy if the heads lie side by side; `apart`: rows may then lie apart."""
    first, width = heads[0], 0
    (batch, _, length, size), (row_stride, _, place_stride, _) = first.shape, first.stride()
    for one in heads:
        at = one.untyped_storage()._cdata, one.storage_offset() - width, one.stride()
        if at != (first.untyped_storage()._cdata, first.storage_offset(), (row_stride, size, place_stride, 1)):
            return torch.cat([part.permute(2, 0, 1, 3) for part in heads], 2).flatten(2)
        width += one.shape[1] * size
    stacked = first.as_strided((length, batch, width), (place_stride, row_stride, 1))
    return stacked if apart else stacked.contiguous()


def merge_heads(x: Tensor) -> Tensor:
    """Merge [batch, heads, sequence, size] to [sequence, batch, heads x size]."""
    return x.permute(2, 0, 1, 3).flatten(2)


class KVCache:
    """Keys and values, or what these are made of, of the tokens of one micro-batch so far, by attention layer."""

    def __init__(self, room: int) -> None:
        """Create an empty cache of at most `room` tokens."""
        self._room = room
        self._layers: dict[nn.Module, list[Tensor]] = {}
        """Tensors [batch, heads, room, head size] by layer."""

    def append(self, layer: nn.Module, first: int, *new: Tensor) -> list[Tensor]:
        """Store tensors [batch, heads, tokens, head size] of tokens from `first` on; return those of all tokens."""
        end = first + new[0].shape[2]
        if layer not in self._layers:
            self._layers[layer] = [x.new_empty(*x.shape[:2], self._room, x.shape[3]) for x in new]
        for memory, x in zip(self._layers[layer], new, strict=True):
            memory[:, :, first:end] = x
        return [memory[:, :, :end] for memory in self._layers[layer]]
