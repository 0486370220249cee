"""One record for every logical tensor of a model: its shape, how it is sharded and where it is stored.

A *logical* tensor is what a paper would name (the query projection of layer 3). A *stored* parameter is what a kernel
wants: query, key and value projections are stacked in one matrix, of which a tensor-parallel rank holds a slice of
each. Initial weights, gradient reduction, weight decay, LAMB, checkpoints and conversion read this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorRank:
    """A rank of a tensor-parallel group."""

    rank: int = 0
    size: int = 1
    sequence: bool = False
    """Sequence parallelism: between the matrices each rank holds 1 / size of the sequence."""

    @property
    def slices_sequence(self) -> bool:
        return self.sequence and self.size > 1

    @property
    def num_slices(self) -> int:
        """Slices of the hidden states between the matrices; 1 without sequence parallelism."""
        return self.size if self.slices_sequence else 1

    def bounds(self, length: int) -> tuple[int, int]:
        """This rank's [start, stop) of `length` items in equal shares; the last shares may be short or empty."""
        share = -(-length // self.size)
        return min(self.rank * share, length), min((self.rank + 1) * share, length)


def room(length: int, size: int, multiple: int = 1) -> int:
    """What each of `size` ranks has for its share of `length` items; a multiple if that adds at most an eighth."""
    share = -(-length // size)
    padded = -(-share // multiple) * multiple
    return padded if 8 * (padded - share) <= share else share


@dataclass(frozen=True)
class Placement:
    """A logical tensor and the slice of it that this rank holds."""

    name: str
    """Global name, the same in every layout, e.g. `layers.3.attention.query.weight`."""
    shape: tuple[int, ...]
    """Global shape."""
    std: float | None = None
    """Standard deviation of the normal initial values; None: constant."""
    constant: float = 0.0
    cut_dim: int | None = None
    """Dimension that is sharded over the tensor-parallel ranks; None: every rank holds all of it."""
    multiple: int = 1
    """A rank stores a multiple of so many indices along `cut_dim` (`room`), which matrix products of accelerators like;
    those that are nobody's are padding."""
    partial: bool = False
    """True for a replicated tensor whose gradient comes from a part of the sequence or of the heads, so that gradients
    are summed over the tensor-parallel ranks."""
    shared: str | None = None
    """Mesh axis of the pipeline stages that each hold a copy, whose gradients are summed: `ends` (the first and the
    last stage) or `pipeline` (all). None: one stage."""
    expert: bool = False
    """True for a tensor of an expert; once placed, in layouts that split the experts only."""
    trained: bool = True
    """False: frozen (`train.frozen`), with all tensors stored in the same parameter."""
    stored_in: str = ""
    """Name of the module parameter."""
    offset: int = 0
    """First element inside that parameter, flattened; logical tensors are stacked along dimension 0."""
    start: int = 0
    """First index along `cut_dim` on this rank; `stop`: the end."""
    stop: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.stop - self.start if dim == self.cut_dim else n for dim, n in enumerate(self.shape))

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def numel(self) -> int:
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
        self._by_name: dict[str, Placement] = {}
        self._by_parameter: dict[str, list[Placement]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each module parameter, padding included, in the order of placement."""
        return self._shapes

    def place(self, parameter: str, tensors: Sequence[Placement], rank: TensorRank) -> None:
        """Enter this rank's part of one parameter, in which `tensors` are stacked (they differ in dimension 0 only),
        and fill in their offsets. The parameter has room for the largest share and `multiple`; the rest is padding,
        which belongs to no logical tensor."""
        offset, rows = 0, 0
        share: tuple[int, ...] = ()
        for tensor in tensors:
            assert tensor.name not in self._by_name, f"{tensor.name} is built twice"
            start, stop = (0, 0) if tensor.cut_dim is None else rank.bounds(tensor.shape[tensor.cut_dim])
            partial = rank.size > 1 and tensor.cut_dim is None and (rank.sequence or tensor.partial)
            placed = replace(tensor, stored_in=parameter, offset=offset, start=start, stop=stop, partial=partial)
            self._by_name[tensor.name] = placed
            self._by_parameter.setdefault(parameter, []).append(placed)
            share = tuple(
                room(n, rank.size, tensor.multiple) if dim == tensor.cut_dim else n
                for dim, n in enumerate(tensor.shape)
            )
            offset += math.prod(share)
            rows += share[0]
        self._shapes[parameter] = (rows, *share[1:])

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Placement:
        return self._by_name[name]

    def stored_in(self, parameter: str) -> list[Placement]:
        """The logical tensors of a module parameter, in the order of their offsets."""
        return self._by_parameter.get(parameter, [])

    def is_expert(self, parameter: str) -> bool:
        """Whether it is of experts that the layout splits."""
        return any(placement.expert for placement in self.stored_in(parameter))

    def is_trained(self, parameter: str) -> bool:
        return all(placement.trained for placement in self.stored_in(parameter))

    @property
    def numel(self) -> int:
        return sum(entry.numel for entry in self)
