"""Linear layers and embeddings, each entering its logical tensors in the placement table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from pangu.layers.builder import Builder, NewTensor


class Linear(nn.Module):
    """y = x Wᵀ + b, for one or several logical projections of the same input computed in one product."""

    def __init__(self, build: Builder, name: str, inputs: int, outputs: Mapping[str, int], std: float) -> None:
        """
        Args:
            build: stands at the parent of this layer.
            name: attribute of the parent that holds this layer.
            inputs: width of the input.
            outputs: logical name -> width; `{"query": h, "key": h, "value": h}` is a fused projection.
            std: standard deviation of the initial weights; biases begin at 0.
        """
        super().__init__()
        self.weight = build.parameter(
            f"{name}.weight", [NewTensor(f"{out}.weight", (width, inputs), std) for out, width in outputs.items()]
        )
        self.bias = build.parameter(
            f"{name}.bias", [NewTensor(f"{out}.bias", (width,), None) for out, width in outputs.items()]
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., sum of outputs]."""
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of vectors looked up by id."""

    def __init__(self, build: Builder, name: str, rows: int, width: int, std: float) -> None:
        """Arguments as for `Linear`; the table has shape [rows, width]."""
        super().__init__()
        self.weight = build.parameter(f"{name}.weight", [NewTensor(f"{name}.weight", (rows, width), std)])

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., width]."""
        return F.embedding(ids, self.weight)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016) with biased variance; statistics are fp32 whatever the input's format."""

    def __init__(self, build: Builder, name: str, width: int, eps: float) -> None:
        """Arguments as for `Linear`; gain 1 and bias 0 at first."""
        super().__init__()
        self.weight = build.parameter(f"{name}.weight", [NewTensor(f"{name}.weight", (width,), None, 1.0)])
        self.bias = build.parameter(f"{name}.bias", [NewTensor(f"{name}.bias", (width,), None)])
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
