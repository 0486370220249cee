"""Makes parameters: enters every logical tensor in the placement table and returns an empty parameter for the module.

Models are built on the meta device, where nothing takes memory; the units of `pangu.zero` give the parameters their
storage and their first values afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pangu.collectives.regions import TensorRegion
from pangu.layers.deferred import WeightGradients
from pangu.topology.placement import Placement, PlacementTable


@dataclass(frozen=True)
class NewTensor:
    """A logical tensor about to be built."""

    name: str
    """Name below the current path."""
    shape: tuple[int, ...]
    """Global shape."""
    std: float | None
    """Standard deviation of the first values; None for a constant."""
    constant: float = 0.0
    """First value where `std` is None."""
    cut_dim: int | None = None
    """Dimension cut over the tensor-parallel ranks."""
    shared: str | None = None
    """Pipeline stages that hold a copy of it, as in `Placement`."""
    partial: bool = False
    """Each rank's gradient is a part of the sum even without sequence parallelism."""


@dataclass(frozen=True)
class Builder:
    """The table that is being filled, the path that is being built, e.g. `layers.3.attention`, and for whom."""

    table: PlacementTable
    path: str = ""
    region: TensorRegion = field(default_factory=TensorRegion)
    """The ranks that share the matrices. Layers read it; models only pass it on."""
    later: WeightGradients | None = None
    """Where backward may put the gradients of matrices aside."""

    def at(self, name: object) -> Builder:
        """The same table, one step further down."""
        return replace(self, path=self._below(str(name)))

    def parameter(self, stored_in: str, tensors: Sequence[NewTensor]) -> nn.Parameter:
        """This rank's part of one parameter that holds `tensors` one below the other (they differ in dimension 0 only).

        A tensor whose cut dimension is not a multiple of the ranks is stored with room for the largest share; the rest
        is padding, which belongs to no logical tensor.

        Args:
            stored_in: name of the parameter below the current path, as `named_parameters` will give it.
            tensors: logical tensors in the order in which they are stacked.
        """
        offset, rows = 0, 0
        share: tuple[int, ...] = ()
        for tensor in tensors:
            placed = self._place(tensor, self._below(stored_in), offset)
            self.table.add(placed)
            share = tuple(
                -(-size // self.region.size) if dim == tensor.cut_dim else size for dim, size in enumerate(tensor.shape)
            )
            offset += math.prod(share)
            rows += share[0]
        return nn.Parameter(torch.empty((rows, *share[1:]), device="meta"))

    def _place(self, tensor: NewTensor, stored_in: str, offset: int) -> Placement:
        start, stop = (0, 0) if tensor.cut_dim is None else self.region.bounds(tensor.shape[tensor.cut_dim])
        return Placement(
            name=self._below(tensor.name),
            shape=tensor.shape,
            stored_in=stored_in,
            offset=offset,
            std=tensor.std,
            constant=tensor.constant,
            cut_dim=tensor.cut_dim,
            start=start,
            stop=stop,
            partial=self.region.size > 1 and tensor.cut_dim is None and (self.region.sequence or tensor.partial),
            shared=tensor.shared,
        )

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
