"""Parallel linear layers, embeddings and norms, of the shapes and shards in the placement table.

On one rank they are the ordinary layers. On two ranks, y = x Wᵀ with W stored as [outputs, inputs]:

>>> import torch
>>> x = torch.tensor([1, 2, 3, 4, 5, 6])
>>> W = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1], [1, 1, 0, 1, 0, 0]])
>>> (x @ W.t()).tolist()
[9, 12, 14, 7]

Column parallel: every rank has the full x and some of the outputs. The columns of A in Y = XA are split (Shoeybi et al.
2019, section 3), hence the rows of W. The forward pass sends nothing.

>>> [(x @ rows.t()).tolist() for rows in W.chunk(2, dim=0)]
[[9, 12], [14, 7]]

Row parallel: every rank has some of the inputs and a part of every output; the parts are summed by an all-reduce (a
reduce-scatter with sequence parallelism). The rows of A are split, hence the columns of W.

>>> y0, y1 = (part @ columns.t() for part, columns in zip(x.chunk(2), W.chunk(2, dim=1)))
>>> y0.tolist(), y1.tolist(), (y0 + y1).tolist()
([4, 2, 3, 3], [5, 10, 11, 4], [9, 12, 14, 7])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.collectives.regions import TensorRegion, enter, join_pieces, leave
from pangu.layers.apex import NORMS
from pangu.layers.attention import split_heads, split_projections
from pangu.layers.builder import Builder
from pangu.layers.tensor_parallel_matmul import column_parallel_matmul, lookup, row_parallel_matmul

if TYPE_CHECKING:
    from pangu.layers.weight_gradient_store import WeightGradientStore


class ParallelLinear(nn.Module):
    """Linear layer, with bias if the table has one, that tensor-parallel ranks split along `dim`."""

    def __init__(self, build: Builder, name: str, dim: int) -> None:
        """Build attribute `name` of the parent, at which `build` is; the group size must divide `dim`."""
        super().__init__()
        self.placements, self.dim = build.placements(f"{name}.weight"), dim
        assert all(placement.shape[dim] % build.region.size == 0 for placement in self.placements), self.placements
        self.region, self.store = build.region, build.layers_store
        self.fp8: Any = None if build.scales is None else build.scales.of(self.placements[0].name)
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")
        self.in_graph: Callable[[ParallelLinear, Tensor], Tensor] | None = None
        """Replacement in the graph of a compiled layer."""

    def logical(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Return the global shape of the only matrix and of its bias, with the dimension of each that is sharded."""
        shape = self.placements[0].shape
        return {"weight": (shape, self.dim), "bias": (shape[:1], None if self.dim else 0)}


class ColumnParallelLinear(ParallelLinear):
    """Linear layer y = x Wᵀ + b with sharded *outputs*, for one or several projections of the same input."""

    def __init__(self, build: Builder, name: str, from_table: bool = False) -> None:
        """Build the layer; with `from_table`, its input is a full lookup of a `PositionEmbedding` on every rank."""
        # Then nothing is communicated per layer: the gradients of the table are summed once per step.
        super().__init__(build, name, dim=0)
        self.region = TensorRegion() if from_table else build.region
        self.widths = [placement.local_shape[0] for placement in self.placements]

    def forward(self, x: Tensor) -> Tensor:
        """Map [sequence (/ ranks with sequence parallelism), ..., inputs] to [sequence, ..., outputs / ranks]."""
        if self.in_graph is not None and torch.compiler.is_compiling():
            return self.in_graph(self, x)
        output: Tensor = column_parallel_matmul(x, self.weight, self.bias, self.region, self.store, self.fp8)
        return output


class HeadProjections(ColumnParallelLinear):
    """Projections of the same input to attention heads, such as queries, keys and values."""

    def __init__(
        self, build: Builder, name: str, head_size: int, ranks_per_key_head: int = 1, from_table: bool = False
    ) -> None:
        """Build the layer; if several ranks share a head of the last two, keys and values, they join its pieces."""
        super().__init__(build, name, from_table)
        self.head_size, self.ranks_per_key_head = head_size, ranks_per_key_head

    def forward(self, x: Tensor) -> Any:
        """Return the heads [batch, heads / ranks, sequence, head size] of each projection."""
        if self.ranks_per_key_head > 1:
            parts = super().forward(x).split_with_sizes(self.widths, -1)
            parts = *parts[:-2], *join_pieces(torch.stack(parts[-2:]), self.ranks_per_key_head, self.region)
            return tuple(split_heads(part, self.head_size) for part in parts)
        if self.in_graph is not None and torch.compiler.is_compiling():
            return split_projections(self.in_graph(self, x), self.widths, self.head_size)
        heads = self.widths, self.head_size
        return column_parallel_matmul(x, self.weight, self.bias, self.region, self.store, self.fp8, heads)


class ReplicatedLinear(ColumnParallelLinear):
    """Linear layer that every rank computes with all outputs, for its slice of the sequence; never in fp8."""

    def __init__(self, build: Builder, name: str) -> None:
        """Build attribute `name` of the parent."""
        super().__init__(replace(build, region=TensorRegion(), scales=None), name)
        self.readers = build.region

    def enter(self, x: Tensor) -> Tensor:
        """Return an output for ranks that each use it in another way: full, with gradients summed over them."""
        return enter(x, self.readers)


class RowParallelLinear(ParallelLinear):
    """Linear layer y = x Wᵀ + b with sharded *inputs*; the bias is added once, after the sum over ranks."""

    def __init__(self, build: Builder, name: str) -> None:
        """Build attribute `name` of the parent."""
        super().__init__(build, name, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [sequence, ..., inputs / ranks] to [sequence (/ ranks with sequence parallelism), ..., outputs]."""
        if self.in_graph is not None and torch.compiler.is_compiling():
            return self.in_graph(self, x)
        return row_parallel_matmul(x, self.weight, self.bias, self.region, self.store, self.fp8)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with sharded rows: ranks look up their own tokens, and the results are summed."""

    # Shares are equal; if the group size does not divide the rows, the last share ends in padding.
    def __init__(self, build: Builder, name: str) -> None:
        """Build attribute `name` of the parent."""
        super().__init__()
        (table,) = build.placements(f"{name}.weight")
        self.region, self.store, self.rows = build.region, build.store, table.shape[0]
        self.weight = build.parameter(f"{name}.weight")

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [sequence, batch] to [sequence (/ ranks with sequence parallelism), batch, width]."""
        return vocab_parallel_lookup(ids, self.weight, self.rows, self.region, self.store)


def vocab_parallel_lookup(
    ids: Tensor,
    table: Tensor,
    rows: int,
    region: TensorRegion,
    store: WeightGradientStore | None,
    completes: bool = True,
) -> Tensor:
    """Look up ids in a `VocabParallelEmbedding` of `rows` rows, or a copy; `completes`: no other gradient follows."""
    if region.size == 1:
        return lookup(ids, table, store, completes)
    start, stop = region.bounds(rows)
    elsewhere = (ids < start) | (ids >= stop)
    # spread the other ranks' ids over all rows: gradients of one row, even zeros, would wait for each other
    vectors = lookup((ids - start) % len(table), table, store, completes)
    return leave(vectors.masked_fill(elsewhere[..., None], 0.0), region)


class PositionEmbedding(nn.Module):
    """Position embedding, replicated on every rank."""

    def __init__(self, build: Builder, name: str, whole: bool = False) -> None:
        """Build the table; with `whole`, every rank looks up all positions, else those of its slice of the sequence."""
        super().__init__()
        self.region = TensorRegion() if whole else build.region
        self.weight = build.parameter(f"{name}.weight")

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions int64 [batch, sequence] to [sequence (/ ranks with sequence parallelism), batch, width]."""
        return F.embedding(self.region.local_sequence(positions.t()), self.weight)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016) with biased variance and fp32 statistics."""

    def __init__(self, build: Builder, name: str, eps: float) -> None:
        """Build gain and bias; `eps` is inside the root."""
        super().__init__()
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")
        self.eps, self.kernels = eps, NORMS[build.norm]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.kernels[0](x, x.shape[-1:], self.weight, self.bias, self.eps)


class RMSNorm(LayerNorm):
    """Root-mean-square norm, x / sqrt(mean(x²) + eps) times a gain (Zhang & Sennrich 2019, equation 4), in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.kernels[1](x, x.shape[-1:], self.weight, self.eps)


def make_norm(build: Builder, name: str, eps: float, kind: str) -> nn.Module:
    """Return a norm of kind `layernorm` or `rmsnorm`; other arguments as in `LayerNorm`."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](build, name, eps)
