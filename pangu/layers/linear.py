"""Parallel linear layers, embeddings and norms, each entering its logical tensors in the placement table.

On a region of one rank they are the ordinary layers. On two ranks, y = x Wᵀ with W stored as [outputs, inputs]:

>>> import torch
>>> x = torch.tensor([1, 2, 3, 4, 5, 6])
>>> W = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1], [1, 1, 0, 1, 0, 0]])
>>> (x @ W.t()).tolist()
[9, 12, 14, 7]

Column parallel: every rank takes the whole x and has some of the outputs. It is the columns of A in Y = XA that are cut
(Shoeybi et al. 2019), hence the rows of W. Nothing is sent in forward.

>>> [(x @ rows.t()).tolist() for rows in W.chunk(2, dim=0)]
[[9, 12], [14, 7]]

Row parallel: every rank takes some of the inputs and has a part of every output; the parts are summed by an all-reduce
(by a reduce-scatter with sequence parallelism). The rows of A are cut, hence the columns of W.

>>> y0, y1 = (part @ columns.t() for part, columns in zip(x.chunk(2), W.chunk(2, dim=1)))
>>> y0.tolist(), y1.tolist(), (y0 + y1).tolist()
([4, 2, 3, 3], [5, 10, 11, 4], [9, 12, 14, 7])
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from pangu.collectives.regions import TensorRegion, leave
from pangu.layers.builder import Builder, NewTensor
from pangu.layers.products import column_product, lookup, row_product


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the *outputs* dealt to the ranks (Shoeybi et al. 2019, section 3), for one or several logical
    projections of the same input computed in one product.

    In the paper's Y = XA it is A's columns that are cut; A is stored transposed, so here it is the rows of W.
    """

    def __init__(
        self,
        build: Builder,
        name: str,
        inputs: int,
        outputs: Mapping[str, int],
        std: float,
        biases: bool = True,
        from_table: bool = False,
    ) -> None:
        """
        Args:
            build: stands at the parent of this layer.
            name: attribute of the parent that holds this layer.
            inputs: width of the input.
            outputs: logical name -> width; `{"query": h, "key": h, "value": h}` is a fused projection. The ranks must
                divide each width.
            std: standard deviation of the initial weights; biases begin at 0.
            biases: false: y = x Wᵀ.
            from_table: the input comes from a `PositionEmbedding` of all positions. Nothing is communicated: every rank
                looks its input up, and the parts of the table's gradient are summed once per step.
        """
        super().__init__()
        assert all(width % build.region.size == 0 for width in outputs.values()), outputs
        self.region = TensorRegion() if from_table else build.region
        self.later = build.later
        self.widths = [width // build.region.size for width in outputs.values()]
        """Of each projection in the result."""
        self.weight = build.parameter(
            f"{name}.weight",
            [NewTensor(f"{out}.weight", (width, inputs), std, cut_dim=0) for out, width in outputs.items()],
        )
        vectors = [NewTensor(f"{out}.bias", (width,), None, cut_dim=0) for out, width in outputs.items()]
        self.bias = build.parameter(f"{name}.bias", vectors) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[sequence (/ ranks with sequence parallelism), ..., inputs] -> [sequence, ..., sum of outputs / ranks]."""
        return column_product(x, self.weight, self.bias, self.region, self.later)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the *inputs* dealt to the ranks; the partial sums are added up, the bias once, afterwards."""

    def __init__(self, build: Builder, name: str, inputs: int, outputs: int, std: float, biases: bool = True) -> None:
        """Arguments as for `ColumnParallelLinear`; the ranks must divide `inputs`."""
        super().__init__()
        assert inputs % build.region.size == 0, inputs
        self.region = build.region
        self.later = build.later
        self.weight = build.parameter(
            f"{name}.weight", [NewTensor(f"{name}.weight", (outputs, inputs), std, cut_dim=1)]
        )
        self.bias = build.parameter(f"{name}.bias", [NewTensor(f"{name}.bias", (outputs,), None)]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[sequence, ..., inputs / ranks] -> [sequence (/ ranks with sequence parallelism), ..., outputs]."""
        return row_product(x, self.weight, self.bias, self.region, self.later)


class VocabParallelEmbedding(nn.Module):
    """A table of word vectors with its rows dealt to the ranks; each looks up its own words, and results are summed.

    Rows are dealt in equal shares; where the ranks do not divide them, the last share ends in padding.
    """

    def __init__(self, build: Builder, name: str, rows: int, width: int, std: float, shared: str | None = None) -> None:
        """Arguments as for `ColumnParallelLinear`; the table has global shape [rows, width]; `shared` as in
        `NewTensor`."""
        super().__init__()
        self.region = build.region
        self.later = build.later
        self.rows = rows
        table = NewTensor(f"{name}.weight", (rows, width), std, cut_dim=0, shared=shared)
        self.weight = build.parameter(f"{name}.weight", [table])

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [sequence, batch] -> [sequence (/ ranks with sequence parallelism), batch, width]."""
        if self.region.size == 1:
            return lookup(ids, self.weight, self.later)
        start, stop = self.region.bounds(self.rows)
        elsewhere = (ids < start) | (ids >= stop)
        found = lookup((ids - start).masked_fill(elsewhere, 0), self.weight, self.later)
        return leave(found.masked_fill(elsewhere[..., None], 0.0), self.region)


class PositionEmbedding(nn.Module):
    """A table of position vectors, held whole by every rank."""

    def __init__(self, build: Builder, name: str, rows: int, width: int, std: float, whole: bool = False) -> None:
        """
        Args:
            build, name, rows, width, std: as for `VocabParallelEmbedding`.
            whole: every rank looks up all positions and uses the vectors for its own part of the heads; without it each
                looks up the positions of its slice of the sequence.
        """
        super().__init__()
        self.region = TensorRegion() if whole else build.region
        table = NewTensor(f"{name}.weight", (rows, width), std, partial=whole)
        self.weight = build.parameter(f"{name}.weight", [table])

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [batch, sequence] -> [sequence (/ ranks with sequence parallelism, if not `whole`), batch, width]."""
        return F.embedding(self.region.local_sequence(positions.t()), self.weight)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016) with biased variance; statistics are fp32 whatever the input's format."""

    def __init__(self, build: Builder, name: str, width: int, eps: float, of_heads: bool = False) -> None:
        """
        Args:
            build, name: as for `ColumnParallelLinear`; gain 1 and bias 0 at first.
            width: of the last dimension.
            eps: inside the root.
            of_heads: it norms heads, of which a tensor-parallel rank has its own: gradients are parts of the sum.
        """
        super().__init__()
        gain, bias = (
            NewTensor(f"{name}.{kind}", (width,), None, first, partial=of_heads)
            for kind, first in (("weight", 1.0), ("bias", 0.0))
        )
        self.weight = build.parameter(f"{name}.weight", [gain])
        self.bias = build.parameter(f"{name}.bias", [bias])
        self.eps, self.of_heads = eps, of_heads

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) times a gain (Zhang & Sennrich 2019, equation 4), without bias.

    Statistics are fp32 whatever the input's format.
    """

    def __init__(self, build: Builder, name: str, width: int, eps: float, of_heads: bool = False) -> None:
        """Arguments as for `LayerNorm`; gain 1 at first."""
        super().__init__()
        gain = NewTensor(f"{name}.weight", (width,), None, 1.0, partial=of_heads)
        self.weight = build.parameter(f"{name}.weight", [gain])
        self.eps, self.of_heads = eps, of_heads

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_norm(build: Builder, name: str, width: int, eps: float, kind: str, of_heads: bool = False) -> nn.Module:
    """`layernorm` or `rmsnorm`; other arguments as for `LayerNorm`."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](build, name, width, eps, of_heads)
