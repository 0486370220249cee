"""A parameter knows how it is cut: one record for every logical tensor, all in one table (DESIGN, idea 2).

A *logical* tensor is what a paper would name (the query projection of layer 3). A *stored* parameter is what a kernel
wants: query, key and value projections stand in one matrix, one below the other, and a rank of a tensor-parallel group
holds a slice of each. Initial weights, gradient reduction, weight decay, LAMB's ratios, checkpoints and conversion all
speak of logical tensors and read this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One logical tensor and the slice of it that this rank holds."""

    name: str
    """Global name, the same in every layout, e.g. `layers.3.attention.query.weight`."""
    shape: tuple[int, ...]
    """Global shape."""
    stored_in: str
    """Name of the module parameter that holds it."""
    offset: int
    """First element of it inside that (flattened) parameter; logical tensors are stacked along dimension 0."""
    std: float | None
    """Initial values: normal with this standard deviation; None for a constant."""
    constant: float = 0.0
    """Initial value where `std` is None."""
    cut_dim: int | None = None
    """Dimension that is cut over the tensor-parallel ranks; None: every rank holds all of it."""
    start: int = 0
    """First index along `cut_dim` that this rank holds."""
    stop: int = 0
    """End of the indices along `cut_dim` that this rank holds."""
    partial: bool = False
    """True where every rank holds all of it but its gradient comes from a part of the sequence or of the heads, so that
    gradients must be summed over the tensor-parallel ranks."""
    shared: str | None = None
    """Group of pipeline stages that each hold a copy of it, whose gradients must be summed: `ends` (the first and the
    last stage), `stages` (all). None: it lives on one stage."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice that this rank holds."""
        if self.cut_dim is None:
            return self.shape
        return (*self.shape[: self.cut_dim], self.stop - self.start, *self.shape[self.cut_dim + 1 :])

    @property
    def local_numel(self) -> int:
        """Number of elements of that slice."""
        return math.prod(self.local_shape)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Global index of the first element of the slice."""
        return tuple(self.start if dim == self.cut_dim else 0 for dim in range(len(self.shape)))

    @property
    def is_vector(self) -> bool:
        """Biases and norms: excluded from weight decay and from layer-wise adaptation by default."""
        return len(self.shape) == 1


class PlacementTable:
    """All logical tensors of a model, in the order in which they were built."""

    def __init__(self) -> None:
        self._entries: dict[str, Placement] = {}
        self._stored: dict[str, list[Placement]] = {}
        """By the module parameter that holds them."""

    def add(self, placement: Placement) -> None:
        """Enter one tensor; names are unique."""
        assert placement.name not in self._entries, f"{placement.name} is built twice"
        self._entries[placement.name] = placement
        self._stored.setdefault(placement.stored_in, []).append(placement)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Placement:
        return self._entries[name]

    def stored_in(self, parameter: str) -> list[Placement]:
        """The logical tensors that one module parameter holds, in the order of their offsets."""
        return list(self._stored.get(parameter, ()))

    @property
    def numel(self) -> int:
        """Number of elements of the model, tied weights counted once."""
        return sum(entry.numel for entry in self)
