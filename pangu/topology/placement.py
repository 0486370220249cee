"""Placement table: shape, sharding and storage of every logical tensor of a model.

A *logical* tensor is one that a paper would name (the query projection of layer 3). A *stored* parameter is laid out
for a kernel: query, key and value projections are stacked in one matrix, of which a tensor-parallel rank holds a slice
of each. Initial weights, gradient reduction, weight decay, LAMB, checkpoints and conversion read this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class TensorRank:
    """Position of a rank in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    sequence: bool = False
    """Sequence parallelism: between the matrices each rank holds 1 / `size` of the sequence."""

    @property
    def slices_sequence(self) -> bool:
        """True if the hidden states are sharded along the sequence between the matrices."""
        return self.sequence and self.size > 1

    @property
    def num_slices(self) -> int:
        """Number of slices of the hidden states between the matrices; 1 without sequence parallelism."""
        return self.size if self.slices_sequence else 1

    def bounds(self, length: int) -> tuple[int, int]:
        """Return this rank's [start, stop) of `length` indices in equal shares; the last ones may be short or empty."""
        share = -(-length // self.size)
        return min(self.rank * share, length), min((self.rank + 1) * share, length)


def room(length: int, size: int, multiple: int = 1) -> int:
    """Return the padded share of each of `size` ranks: rounded up to `multiple` if that adds at most one eighth."""
    share = -(-length // size)
    padded = -(-share // multiple) * multiple
    return padded if 8 * (padded - share) <= share else share


def in_fp8(name: str, shape: Sequence[int]) -> bool:
    """Return whether `precision.matmul=fp8` multiplies a logical tensor in fp8: matrices of layers except experts."""
    # a rank multiplies its slice of a sequence by the last three, whose gradients' blocks would depend on the layout
    path, others = name.split("."), {"router", "experts", "query_down", "kv_down", "shared_key"}
    return path[0] == "layers" and len(shape) == 2 and not others & {*path}


TABLES = "embedding", "query_embedding", "position_bias", "head"
"""Parts of the names of matrices whose rows belong to tokens or positions."""


@dataclass(frozen=True)
class Placement:
    """Logical tensor and the slice of it that this rank holds."""

    name: str
    """Global name, equal in every layout, e.g. `layers.3.attention.query.weight`."""
    shape: tuple[int, ...]
    std: float | None = None
    """Standard deviation of the normal initialization; None: filled with `constant`."""
    constant: float = 0.0
    cut_dim: int | None = None
    """Dimension that is sharded over the tensor-parallel ranks; None: replicated."""
    multiple: int = 1
    """Alignment of the local size along `cut_dim`, padded as in `room`, for fast matmuls on accelerators."""
    partial: bool = False
    """True if tensor-parallel ranks each compute a part of this replicated tensor's gradient, to be summed."""
    heads: int = 1
    """Number of attention heads to which equal blocks of rows belong; 1: no heads."""
    shared: str | None = None
    """Pipeline axis whose stages hold copies with a summed gradient: `ends` or `pipeline` (all); None: one stage."""
    expert: bool = False
    """True if this is a tensor of an expert; once placed, only in layouts that split the experts."""
    trained: bool = True
    """True if this is trained; if not (`train.frozen`), neither are the other tensors of the same parameter."""
    stored_in: str = ""
    """Name of the module parameter that stores this tensor."""
    offset: int = 0
    """First element inside the flattened parameter, in which logical tensors are stacked along dimension 0."""
    start: int = 0
    stop: int = 0
    """End of this rank's indices [start, stop) along `cut_dim`."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's slice, without padding."""
        return tuple(self.stop - self.start if dim == self.cut_dim else n for dim, n in enumerate(self.shape))

    @cached_property
    def local_numel(self) -> int:
        """Number of elements of this rank's slice."""
        return math.prod(self.local_shape)

    @property
    def numel(self) -> int:
        """Number of elements of the logical tensor."""
        return math.prod(self.shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Global index of the first element of this rank's slice."""
        return tuple(self.start if dim == self.cut_dim else 0 for dim in range(len(self.shape)))

    @property
    def is_vector(self) -> bool:
        """True if this is a bias or norm weight, by default excluded from weight decay and layer-wise adaptation."""
        return len(self.shape) == 1

    @property
    def is_matrix(self) -> bool:
        """True if Muon orthogonalizes this: a matrix that maps hidden states to hidden states."""
        return len(self.shape) == 2 and min(self.shape) > 1 and not {*TABLES} & {*self.name.split(".")}

    def matrix_shape(self, split_heads: bool) -> tuple[int, int]:
        """Return the shape of what Muon orthogonalizes: this matrix, or with `split_heads` the rows of a head."""
        rows, columns = self.shape
        return rows // self.heads if split_heads else rows, columns


class PlacementTable:
    """Logical tensors of a model, in the order of construction."""

    def __init__(self) -> None:
        """Create an empty table."""
        self._by_name: dict[str, Placement] = {}
        self._by_parameter: dict[str, list[Placement]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each module parameter, padding included, in the order of placement."""
        return self._shapes

    def place(self, parameter: str, tensors: Sequence[Placement], rank: TensorRank, **changes: bool) -> None:
        """Add a parameter in which `tensors` are stacked along dimension 0, with this rank's offsets and `changes`.

        The parameter has room for the largest share, rounded up to `multiple`; padding belongs to no logical tensor.
        """
        offset, rows = 0, 0
        share: tuple[int, ...] = ()
        for tensor in tensors:
            assert tensor.name not in self._by_name, f"{tensor.name} is built twice"
            start, stop = (0, 0) if tensor.cut_dim is None else rank.bounds(tensor.shape[tensor.cut_dim])
            partial = rank.size > 1 and tensor.cut_dim is None and (rank.sequence or tensor.partial)
            held: dict[str, Any] = {"stored_in": parameter, "offset": offset, "start": start, "stop": stop, **changes}
            placed = replace(tensor, partial=partial, **held)
            self._by_name[tensor.name] = placed
            self._by_parameter.setdefault(parameter, []).append(placed)
            share = tuple(
                room(n, rank.size, tensor.multiple) if dim == tensor.cut_dim else n
                for dim, n in enumerate(tensor.shape)
            )
            offset += math.prod(share)
            rows += share[0]
        self._shapes[parameter] = (rows, *share[1:])

    def extend(self, other: PlacementTable) -> None:
        """Add the parameters of another table behind the own ones."""
        if twice := self._by_name.keys() & other._by_name.keys():
            raise AssertionError(f"{min(twice)} is built twice")
        self._by_name |= other._by_name
        self._by_parameter |= other._by_parameter
        self._shapes |= other._shapes

    def __iter__(self) -> Iterator[Placement]:
        """Iterate over the logical tensors."""
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Placement:
        """Return the logical tensor of a global name."""
        return self._by_name[name]

    def stored_in(self, parameter: str) -> list[Placement]:
        """Return the logical tensors of a module parameter, in the order of their offsets."""
        return self._by_parameter.get(parameter, [])

    def is_expert(self, parameter: str) -> bool:
        """Return whether a module parameter holds experts that the layout splits."""
        return any(placement.expert for placement in self.stored_in(parameter))

    def is_in_fp8(self, parameter: str) -> bool:
        """Return whether a module parameter is a matrix that `precision.matmul=fp8` multiplies in fp8."""
        return any(in_fp8(placement.name, placement.shape) for placement in self.stored_in(parameter))

    def is_trained(self, parameter: str) -> bool:
        """Return whether a module parameter is trained."""
        return all(placement.trained for placement in self.stored_in(parameter))
