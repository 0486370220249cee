"""Home ranks of the matrices that Muon orthogonalizes whole, and what ranks exchange for it, from sizes alone.

A matrix is cut by tensor parallelism, and its slices by ZeRO. Two exchanges bring it to its home, over the ranks that
share the slice and then over those that hold the other slices, and two bring the result back. All ranks of a stage know
all homes. For example, a matrix of 8 elements on two tensor-parallel ranks with two shards each, at home on shard 1 of
the second rank:

    tensor rank       0        0        1        1
    shard             0        1        0        1
    holds             a b      c d      e f      g h
    after the first            a b c d           e f g h
    after the second                             a b c d e f g h
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pangu.config.optimizer import UPDATED_AT_ONCE, matrices_at_once
from pangu.topology.placement import Placement, TensorRank
from pangu.zero.stage_parameters import FlatNumbers, StageParameters


@dataclass(frozen=True)
class Matrix:
    """Matrix with its pieces and its home."""

    placement: Placement
    pieces: tuple[slice, ...]
    """Elements of this rank's slice of the matrix that each shard holds."""
    is_cut: bool
    """True if tensor-parallel ranks hold different slices."""
    shape: tuple[int, int]
    """Shape of what is orthogonalized, see `Placement.matrix_shape`."""
    shard: int = 0
    tensor: int = 0
    """Home: the shard, and the tensor-parallel rank if the matrix is cut; otherwise all of them."""


@dataclass(frozen=True)
class Round:
    """Matrices that are exchanged at once, and this rank's position."""

    matrices: tuple[Matrix, ...]
    shard: int
    shards: int
    cut: TensorRank

    @property
    def ranks(self) -> range:
        """Shards."""
        return range(self.shards)

    @cached_property
    def gathered(self) -> list[Matrix]:
        """Matrices whose slices come together on this rank."""
        return [matrix for matrix in self.matrices if matrix.shard == self.shard]

    @cached_property
    def cuts(self) -> list[Matrix]:
        """Matrices of `gathered` that are cut."""
        return [matrix for matrix in self.gathered if matrix.is_cut]

    @cached_property
    def at_home(self) -> list[Matrix]:
        """Matrices that this rank orthogonalizes."""
        return [matrix for matrix in self.gathered if not matrix.is_cut or matrix.tensor == self.cut.rank]

    @cached_property
    def shapes(self) -> Counter[tuple[int, int]]:
        """Number of matrices of each shape that this rank orthogonalizes."""
        shapes: Counter[tuple[int, int]] = Counter()
        for matrix in self.at_home:
            shapes[matrix.shape] += matrix.placement.numel // math.prod(matrix.shape)
        return shapes

    @cached_property
    def pieces(self) -> tuple[list[list[int]], list[list[int]]]:
        """Elements of each piece sent to each shard, and of each piece received from it."""
        sent = [[_length(m.pieces[self.shard]) for m in self.matrices if m.shard == r] for r in self.ranks]
        return sent, [[_length(m.pieces[r]) for m in self.gathered] for r in self.ranks]

    @cached_property
    def slices(self) -> tuple[list[list[int]], list[list[int]]]:
        """Elements of each slice sent to each tensor-parallel rank, and of each slice received from it."""
        sent = [[m.placement.local_numel for m in self.cuts if m.tensor == r] for r in range(self.cut.size)]
        return sent, [sent[self.cut.rank]] * self.cut.size

    def exchanges(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the exchanges there: group (`shard`, `tensor`), elements sent to each rank and received from each."""
        for group, (sent, received) in (("shard", self.pieces), ("tensor", self.slices)):
            if (self.shards > 1) if group == "shard" else self.cuts:
                yield group, [*map(sum, sent)], [*map(sum, received)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def matrix_rounds(stage: StageParameters, split_heads: bool, at_once: int = UPDATED_AT_ONCE) -> dict[bool, list[Round]]:
    """Return the rounds of exchange of a rank's stage, for dense matrices (False) and for split experts (True).

    A rank is home of at most `at_once` elements in each, or of one matrix. Homes are balanced by the cost of the
    iterations, the largest first, alike on every rank.
    """
    rounds: dict[bool, list[Round]] = {}
    for experts in (False, True):
        flats = [flat for flat in stage.flats if flat.trained and flat.sharding.experts == experts]
        if not flats:
            continue
        cut, sharding = stage.cuts[experts], flats[0].sharding
        found = [one for flat in flats for one in _matrices_of(flat, stage, cut, split_heads)]
        matrices = _with_homes(found, sharding.size, cut.size)
        numbers = _round_numbers(matrices, at_once)
        rounds[experts] = [
            Round(
                tuple(m for m, of in zip(matrices, numbers, strict=True) if of == n), sharding.rank, sharding.size, cut
            )
            for n in range(max(numbers, default=-1) + 1)
        ]
    return rounds


def _matrices_of(flat: FlatNumbers, stage: StageParameters, cut: TensorRank, split_heads: bool) -> Iterator[Matrix]:
    spans = [replace(flat.sharding, rank=rank).span(flat.padded) for rank in range(flat.sharding.size)]
    for entry, span in flat.tensor_ranges(stage.table):
        if entry.is_matrix:
            bounds = ((max(span.start, s.start), min(span.stop, s.stop)) for s in spans)
            pieces = tuple(slice(a - span.start, b - span.start) if a < b else slice(0, 0) for a, b in bounds)
            is_cut = entry.cut_dim is not None and cut.size > 1
            yield Matrix(entry, pieces, is_cut, entry.matrix_shape(split_heads))


def _with_homes(matrices: Sequence[Matrix], shards: int, tensor: int) -> list[Matrix]:
    """Return the matrices with their homes, those of a shape together."""
    loads = [[0] * tensor for _ in range(shards)]
    placed = []
    for matrix in sorted(matrices, key=lambda one: (-_cost(one), one.placement.shape, one.placement.name)):
        if matrix.is_cut:
            _, shard, rank = min((load, s, t) for s, of_shard in enumerate(loads) for t, load in enumerate(of_shard))
            loads[shard][rank] += _cost(matrix)
        else:
            (_, shard), rank = min((max(of_shard), s) for s, of_shard in enumerate(loads)), 0
            loads[shard] = [load + _cost(matrix) for load in loads[shard]]
        placed.append(replace(matrix, shard=shard, tensor=rank))
    return placed


def _cost(matrix: Matrix) -> int:
    return matrix.placement.numel * min(matrix.shape)


def _round_numbers(matrices: Sequence[Matrix], at_once: int) -> list[int]:
    """Return the number of the round of each matrix."""
    held: dict[tuple[int, int], tuple[int, int]] = {}
    numbers = []
    for matrix in matrices:
        home = matrix.shard, matrix.tensor if matrix.is_cut else -1
        number, elements = held.get(home, (0, 0))
        if elements and elements + matrix.placement.numel > at_once:
            number, elements = number + 1, 0
        held[home] = number, elements + matrix.placement.numel
        numbers.append(number)
    return numbers


def working_bytes(one: Round, following: Round | None, itemsize: int, alias: bool) -> int:
    """Return the transient bytes of a round, with `itemsize` per element; `alias`: as wide as the gradients.

    The first exchange of the `following` round is in flight meanwhile.
    """
    local, cut = (sum(m.placement.local_numel for m in those) for those in (one.gathered, one.cuts))
    joined = sum(m.placement.numel for m in one.at_home if m.is_cut)
    sent, iterating = sum(map(sum, one.pieces[0])), 0
    for shape, count in one.shapes.items():
        # a batch and its next iterate, and the product of the batch with itself
        iterating = max(iterating, min(count, matrices_at_once(shape)) * min(shape) * (2 * max(shape) + min(shape)))
    kept = local if one.shards > 1 or not alias else 0
    most = kept + (max(2 * joined + cut, joined + iterating) if one.cuts else iterating)
    if one.shards == 1:
        return most * itemsize
    most = max(most, kept + local + sent)
    if following is not None:
        most += sum(map(sum, following.pieces[0])) + sum(m.placement.local_numel for m in following.gathered)
    return max(most, 2 * local) * itemsize
