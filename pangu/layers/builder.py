"""Makes parameters: enters every logical tensor in the placement table and returns an empty parameter for the module.

Models are built on the meta device, where nothing takes memory; `initial.materialise` or the units of `pangu.zero` give
the parameters their storage and their first values afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pangu.topology.placement import Placement, PlacementTable


@dataclass(frozen=True)
class NewTensor:
    """A logical tensor about to be built: name below the current path, shape, and first values."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    constant: float = 0.0


@dataclass(frozen=True)
class Builder:
    """The table that is being filled and the path that is being built, e.g. `layers.3.attention`."""

    table: PlacementTable
    path: str = ""

    def at(self, name: object) -> Builder:
        """The same table, one step further down."""
        return replace(self, path=self._below(str(name)))

    def parameter(self, stored_in: str, tensors: Sequence[NewTensor]) -> nn.Parameter:
        """One parameter that holds `tensors` one below the other (they differ in dimension 0 only).

        Args:
            stored_in: name of the parameter below the current path, as `named_parameters` will give it.
            tensors: logical tensors in the order in which they are stacked.
        """
        offset = 0
        for tensor in tensors:
            name = self._below(tensor.name)
            placed = Placement(name, tensor.shape, self._below(stored_in), offset, tensor.std, tensor.constant)
            self.table.add(placed)
            offset += placed.numel
        rows = sum(tensor.shape[0] for tensor in tensors)
        return nn.Parameter(torch.empty((rows, *tensors[0].shape[1:]), device="meta"))

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
