"""Ranks that own the matrices which Muon orthogonalizes, and the exchanges this takes, computed from sizes alone.

A matrix is cut by tensor parallelism, and its slices by ZeRO. Two exchanges gather it on its owner, over the ranks that
share the slice and then over those that hold the other slices, and two scatter the result. All ranks of a stage know
all owners. For example, a matrix of 8 elements on two tensor-parallel ranks with two shards each, owned by shard 1 of
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
from enum import IntEnum
from functools import cached_property

from pangu.config.optimizer import UPDATED_AT_ONCE, matrices_at_once
from pangu.topology.placement import Placement, TensorRank
from pangu.zero.stage_parameters import FlatSpec, StageParameters

MAX_SLOWDOWN = 1.01
"""Largest factor by which iterations may be slower so that weights are published earlier."""


@dataclass(frozen=True)
class Matrix:
    """Matrix with its pieces and the rank that owns it: gathers, orthogonalizes and scatters it."""

    placement: Placement
    pieces: tuple[slice, ...]
    """Elements of this rank's slice of the matrix that each shard holds."""
    is_cut: bool
    """True if tensor-parallel ranks hold different slices."""
    shape: tuple[int, int]
    """Shape that is orthogonalized, see `Placement.matrix_shape`."""
    flat: int
    """Index of its flat parameter."""
    shard: int = 0
    tensor: int = 0
    """Tensor-parallel rank that owns the matrix with `shard`, if it is cut; otherwise all of them own it."""


@dataclass(frozen=True)
class Round:
    """Matrices that are exchanged at once, and this rank's position."""

    matrices: tuple[Matrix, ...]
    shard: int
    shards: int
    cut: TensorRank

    @property
    def ranks(self) -> range:
        """Indices of the shards."""
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
    def owned(self) -> list[Matrix]:
        """Matrices that this rank orthogonalizes."""
        return [matrix for matrix in self.gathered if not matrix.is_cut or matrix.tensor == self.cut.rank]

    @cached_property
    def shapes(self) -> Counter[tuple[int, int]]:
        """Number of matrices of each shape that this rank orthogonalizes."""
        shapes: Counter[tuple[int, int]] = Counter()
        for matrix in self.owned:
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


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def matrix_rounds(stage: StageParameters, split_heads: bool, at_once: int = UPDATED_AT_ONCE) -> dict[bool, list[Round]]:
    """Return the rounds of exchange of a rank's stage, for dense matrices (False) and for split experts (True).

    A rank owns at most `at_once` elements in each, or of one matrix. Owners are balanced by the cost of the
    iterations, alike on every rank.
    """
    rounds: dict[bool, list[Round]] = {}
    for experts in (False, True):
        flats = [flat for flat in stage.flats if flat.trained and flat.sharding.experts == experts]
        cut = stage.cuts[experts]
        found = [[*_matrices_of(flat, stage, cut, split_heads)] for flat in flats]
        if any(found):
            sharding = flats[0].sharding
            divided = _divided([*filter(None, found)], sharding.size, cut.size, at_once)
            rounds[experts] = [Round(tuple(one), sharding.rank, sharding.size, cut) for one in divided]
    return rounds


def _matrices_of(flat: FlatSpec, stage: StageParameters, cut: TensorRank, split_heads: bool) -> Iterator[Matrix]:
    spans = [replace(flat.sharding, rank=rank).span(flat.padded) for rank in range(flat.sharding.size)]
    for entry, span in flat.tensor_ranges(stage.table):
        if entry.is_matrix:
            bounds = ((max(span.start, s.start), min(span.stop, s.stop)) for s in spans)
            pieces = tuple(slice(a - span.start, b - span.start) if a < b else slice(0, 0) for a, b in bounds)
            is_cut = entry.cut_dim is not None and cut.size > 1
            yield Matrix(entry, pieces, is_cut, entry.matrix_shape(split_heads), flat.index)


def _divided(flats: Sequence[Sequence[Matrix]], shards: int, tensor: int, at_once: int) -> list[list[Matrix]]:
    """Divide the matrices of flat parameters into rounds.

    The weights of a flat parameter are published after its last matrix, so that few flat parameters should be updated
    at a time. But ranks wait for each other in each round, which costs least with matrices of one shape: of 2 large
    matrices and 4 small ones in each flat parameter, 4 ranks take turns of 2 flat parameters without waiting.
    """
    least = sum(_cost(one) for matrices in flats for one in matrices)
    found: list[tuple[int, list[list[Matrix]]]] = []
    for width in (2**power for power in range(1 + len(flats).bit_length())):
        found.append(_assign_owners(flats, width, shards, tensor, at_once))
        if found[-1][0] * shards * tensor <= MAX_SLOWDOWN * least:
            break
    fastest = min(cost for cost, _ in found)
    return next(rounds for cost, rounds in found if cost <= MAX_SLOWDOWN * fastest)


def _assign_owners(
    flats: Sequence[Sequence[Matrix]], width: int, shards: int, tensor: int, at_once: int
) -> tuple[int, list[list[Matrix]]]:
    """Return the cost and the rounds of `width` flat parameters at a time, the largest matrices first."""
    total, rounds = 0, [list[Matrix]()]
    # cost of each rank; elements and cost of each rank in the last round
    loads, held, costs = ([0] * (shards * tensor) for _ in range(3))
    for start in range(0, len(flats), width):
        window = [matrix for matrices in flats[start : start + width] for matrix in matrices]
        for matrix in sorted(window, key=lambda one: (-_cost(one), one.placement.shape)):
            if matrix.is_cut or tensor == 1:
                first = loads.index(min(loads))
                owners = range(first, first + 1)
            else:
                fullest = [max(loads[first : first + tensor]) for first in range(0, len(loads), tensor)]
                first = fullest.index(min(fullest)) * tensor
                owners = range(first, first + tensor)
            numel, cost = matrix.placement.numel, _cost(matrix)
            if any(held[owner] and held[owner] + numel > at_once for owner in owners):
                total += max(costs)
                rounds.append([])
                held, costs = ([0] * len(loads) for _ in range(2))
            for owner in owners:
                loads[owner] += cost
                costs[owner] += cost
                held[owner] += numel
            rounds[-1].append(replace(matrix, shard=first // tensor, tensor=first % tensor))
    return total + max(costs), rounds


def _cost(matrix: Matrix) -> int:
    return matrix.placement.numel * min(matrix.shape)


def publications(stage: StageParameters, rounds: Sequence[Round]) -> list[list[FlatSpec]]:
    """Return the trained flat parameters without matrices, and those whose last matrices are in each round."""
    last = {matrix.flat: number for number, one in enumerate(rounds) for matrix in one.matrices}
    found: list[list[FlatSpec]] = [[] for _ in range(1 + len(rounds))]
    for flat in stage.flats:
        if flat.trained:
            found[1 + last.get(flat.index, -1)].append(flat)
    return found


def publish_order(stage: StageParameters, split_heads: bool) -> list[FlatSpec]:
    """Return the trained flat parameters in the order in which their weights are published."""
    rounds = [one for kind_rounds in matrix_rounds(stage, split_heads).values() for one in kind_rounds]
    first, *others = publications(stage, rounds)
    finished = (number for number, step in steps_of(rounds) if step is RoundStep.FINISH)
    return [*first, *(flat for number in finished for flat in others[number])]


class RoundStep(IntEnum):
    """Step of a round; each of four starts an exchange, which the following one waits for."""

    SEND = 0
    """Send shards to the owners."""
    JOIN = 1
    """Send slices to the tensor-parallel rank of the owner."""
    ARRIVE = 2
    ITERATE = 3
    """Orthogonalize."""
    SPLIT = 4
    """Send slices of the results back."""
    RETURN = 5
    """Send shards of the results back."""
    FINISH = 6


def steps_of(rounds: Sequence[Round]) -> list[tuple[int, RoundStep]]:
    """Return the order of the steps of all rounds, each with the index of its round, alike on all ranks.

    Exchanges are in flight while other rounds are orthogonalized. With both kinds, next to the iterations of round 2:

        send          round 4        split         round 1
        join          round 3        return        round 0
    """
    keys = []
    for number, one in enumerate(rounds):
        cut, apart = int(any(matrix.is_cut for matrix in one.matrices)), int(one.shards > 1)
        early, late = (number - cut - apart, number - cut), (number + cut, number + cut + apart)
        for step, tick in zip(RoundStep, (*early, number, number, number, *late), strict=True):
            # start exchanges of later rounds before the iterations, and finish those of earlier ones after them
            own = 2 * ((step >= RoundStep.ITERATE) + (step > RoundStep.ITERATE))
            keys.append((tick, 1 if number > tick else 3 if number < tick else own, number, step))
    return [(number, step) for _, _, number, step in sorted(keys)]


def exchanges(rounds: Sequence[Round]) -> Iterator[tuple[Round, str, list[int], list[int], bool]]:
    """Yield the exchanges of this rank.

    Each with its round, group (`shard`, `tensor`), elements sent to each rank and received from each, and whether this
    rank orthogonalizes matrices while it is in flight.
    """
    steps = steps_of(rounds)
    place = {key: index for index, key in enumerate(steps)}
    computing = [index for (number, step), index in place.items() if step is RoundStep.ITERATE and rounds[number].owned]
    for number, step in steps:
        one = rounds[number]
        if step in (RoundStep.SEND, RoundStep.RETURN):
            group, both, exists = "shard", one.pieces, one.shards > 1
        else:
            group, both, exists = "tensor", one.slices, step in (RoundStep.JOIN, RoundStep.SPLIT) and bool(one.cuts)
        if exists:
            sent, received = ([*map(sum, each)] for each in (both if step < RoundStep.ITERATE else both[::-1]))
            span = range(place[number, step], place[number, RoundStep(step + 1)])
            yield one, group, sent, received, any(index in span for index in computing)


def working_bytes(rounds: Sequence[Round], itemsize: int, alias: bool) -> int:
    """Return the peak transient bytes of all rounds, with `itemsize` per element; `alias`: as wide as the gradients."""
    level = peak = 0

    def hold(elements: int, passing: int = 0) -> None:
        nonlocal level, peak
        peak, level = max(peak, level + max(elements, passing)), level + elements

    for number, step in steps_of(rounds):
        one = rounds[number]
        local, cut = (sum(m.placement.local_numel for m in those) for those in (one.gathered, one.cuts))
        sent = sum(map(sum, one.pieces[0]))
        joined = sum(m.placement.numel for m in one.owned if m.is_cut)
        apart, copied = one.shards > 1, one.shards > 1 or not alias
        match step:
            case RoundStep.SEND if apart:
                hold(sent + local)
            case RoundStep.JOIN:
                hold(-sent * apart)  # the message is freed, and what arrived after it is joined to slices
                hold(local * (copied and not apart), local * copied)
                hold(cut + joined)
                hold(-cut * copied)
            case RoundStep.ARRIVE if one.cuts:
                hold(-cut)
                hold(0, joined)
            case RoundStep.ITERATE:
                hold(0, max((_iterating(shape, count) for shape, count in one.shapes.items()), default=0))
            case RoundStep.SPLIT if one.cuts:
                hold(joined + cut)
                hold(-joined)
            case RoundStep.RETURN:
                hold(-joined)
                if apart:
                    hold(local + sent)
                    hold(-local)
            case RoundStep.FINISH:
                hold(-(local + sent) if apart else -cut - (local - cut) * copied)
    return peak * itemsize


def _iterating(shape: tuple[int, int], count: int) -> int:
    """Return the elements of a batch of `count` matrices and its next iterate, and of its product with itself."""
    return min(count, matrices_at_once(shape)) * min(shape) * (2 * max(shape) + min(shape))
