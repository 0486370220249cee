"""Parallel linear layers, embeddings and norms, each entering its logical tensors in the placement table.

On a region of one rank they are the ordinary layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from pangu.collectives.regions import column_product, leave
from pangu.layers.builder import Builder, NewTensor


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the *outputs* dealt to the ranks (Shoeybi et al. 2019, section 3), for one or several logical
    projections of the same input computed in one product.

    In the paper's Y = XA it is A's columns that are cut; A is stored transposed, so here it is the rows of W.
    """

    def __init__(
        self, build: Builder, name: str, inputs: int, outputs: Mapping[str, int], std: float, biases: bool = True
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
        """
        super().__init__()
        assert all(width % build.region.size == 0 for width in outputs.values()), outputs
        self.region = build.region
        self.widths = [width // build.region.size for width in outputs.values()]
        self.weight = build.parameter(
            f"{name}.weight",
            [NewTensor(f"{out}.weight", (width, inputs), std, cut_dim=0) for out, width in outputs.items()],
        )
        vectors = [NewTensor(f"{out}.bias", (width,), None, cut_dim=0) for out, width in outputs.items()]
        self.bias = build.parameter(f"{name}.bias", vectors) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[sequence (/ ranks with sequence parallelism), ..., inputs] -> [sequence, ..., sum of outputs / ranks]."""
        if self.region.size == 1:
            return F.linear(x, self.weight, self.bias)
        product = column_product(x, self.weight, self.region)
        return product if self.bias is None else product + self.bias

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same result split into the logical projections: [sequence, ..., outputs / ranks] of each."""
        return self(x).split(self.widths, dim=-1)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the *inputs* dealt to the ranks; the partial sums are added up, the bias once, afterwards."""

    def __init__(self, build: Builder, name: str, inputs: int, outputs: int, std: float, biases: bool = True) -> None:
        """Arguments as for `ColumnParallelLinear`; the ranks must divide `inputs`."""
        super().__init__()
        assert inputs % build.region.size == 0, inputs
        self.region = build.region
        self.weight = build.parameter(
            f"{name}.weight", [NewTensor(f"{name}.weight", (outputs, inputs), std, cut_dim=1)]
        )
        self.bias = build.parameter(f"{name}.bias", [NewTensor(f"{name}.bias", (outputs,), None)]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """[sequence, ..., inputs / ranks] -> [sequence (/ ranks with sequence parallelism), ..., outputs]."""
        if self.region.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = leave(F.linear(x, self.weight), self.region)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table of word vectors with its rows dealt to the ranks; each looks up its own words, and results are summed.

    Rows are dealt in equal shares; where the ranks do not divide them, the last share ends in padding.
    """

    def __init__(self, build: Builder, name: str, rows: int, width: int, std: float, shared: str | None = None) -> None:
        """Arguments as for `ColumnParallelLinear`; the table has global shape [rows, width]; `shared` as in
        `NewTensor`."""
        super().__init__()
        self.region = build.region
        self.rows = rows
        table = NewTensor(f"{name}.weight", (rows, width), std, cut_dim=0, shared=shared)
        self.weight = build.parameter(f"{name}.weight", [table])

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [sequence, batch] -> [sequence (/ ranks with sequence parallelism), batch, width]."""
        if self.region.size == 1:
            return F.embedding(ids, self.weight)
        start, stop = self.region.bounds(self.rows)
        elsewhere = (ids < start) | (ids >= stop)
        found = F.embedding((ids - start).masked_fill(elsewhere, 0), self.weight)
        return leave(found.masked_fill(elsewhere[..., None], 0.0), self.region)


class PositionEmbedding(nn.Module):
    """A table of position vectors, held whole by every rank."""

    def __init__(self, build: Builder, name: str, rows: int, width: int, std: float) -> None:
        """Arguments as for `VocabParallelEmbedding`."""
        super().__init__()
        self.region = build.region
        self.weight = build.parameter(f"{name}.weight", [NewTensor(f"{name}.weight", (rows, width), std)])

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [batch, sequence] -> [sequence (/ ranks with sequence parallelism), batch, width]."""
        return F.embedding(self.region.local_sequence(positions.t()), self.weight)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016) with biased variance; statistics are fp32 whatever the input's format."""

    def __init__(self, build: Builder, name: str, width: int, eps: float) -> None:
        """Arguments as for `ColumnParallelLinear`; gain 1 and bias 0 at first."""
        super().__init__()
        self.weight = build.parameter(f"{name}.weight", [NewTensor(f"{name}.weight", (width,), None, 1.0)])
        self.bias = build.parameter(f"{name}.bias", [NewTensor(f"{name}.bias", (width,), None)])
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) times a gain (Zhang & Sennrich 2019, equation 4), without bias.

    Statistics are fp32 whatever the input's format.
    """

    def __init__(self, build: Builder, name: str, width: int, eps: float) -> None:
        """Arguments as for `ColumnParallelLinear`; gain 1 at first."""
        super().__init__()
        self.weight = build.parameter(f"{name}.weight", [NewTensor(f"{name}.weight", (width,), None, 1.0)])
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_norm(build: Builder, name: str, width: int, eps: float, kind: str) -> nn.Module:
    """`layernorm` or `rmsnorm`; other arguments as for `LayerNorm`."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[kind](build, name, width, eps)
