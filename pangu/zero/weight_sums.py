"""Comparison of all copies of the weights in every step, in the message that carries the gradient norm.

Each rank sums the bits of the weights that it computed with, as 64-bit integers. A sum must be the same on all ranks of
an axis along which they hold copies. Rank r of the R on an axis adds c_r times its sum, with

    c = 1, 2, ..., R - 1, -(1 + 2 + ... + R - 1)

to a number that all ranks of the run share. Equal sums cancel, since the factors add up to 0. A rank that differs does
not, and neither does any set of ranks that differ alike, since the factors of no part of them add up to 0. So a few
numbers show for any number of ranks whether all copies are equal: exactly, because a sum travels in four parts of 16
bits, whose multiples are integers that fp64 holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import COPY_AXES, COPY_PARTS
from pangu.zero.norms import is_cut
from pangu.zero.unshard import Unsharder

NUMBERS = len(COPY_AXES) * COPY_PARTS
"""Numbers of the message, in every layout."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSums:
    """Sums over the bits of the weights of a rank in a step.

    Weights that stay are summed while the last gradients are reduced, those that are gathered for their use (stage 3)
    after the first one: each is read once.
    """

    def __init__(self, flats: Sequence[FlatParameter], table: PlacementTable, unsharder: Unsharder, mesh: Mesh) -> None:
        """Prepare for the flat parameters of a rank; `unsharder` hands over those that it frees."""
        self.rows: list[tuple[str, str]] = []
        """Axis and name of the weights of each sum."""
        self._of: dict[FlatParameter, list[tuple[int, list[slice]]]] = {flat: [] for flat in flats}
        """Rows of each flat parameter with their ranges in it; without ranges, a row sums the full parameter."""
        for flat in flats:
            places = [(placement, span) for placement, span in flat.tensor_ranges(table) if placement.local_numel]
            alike = [span for at, span in places if not at.expert and not is_cut(at, mesh.layout)]
            wanted = [(flat.sharding.axis("replicas"), str(flat), list[slice]())]
            wanted += [("tensor", f"copies in {flat}", alike)] * bool(alike)
            # stages may hold them in different flat parameters
            wanted += [(at.shared, at.name, [span]) for at, span in places if at.shared is not None]
            for axis, name, spans in wanted:
                if mesh.group(axis) is not None:
                    self._of[flat].append((len(self.rows), spans))
                    self.rows.append((axis, name))
        self._unsharder = unsharder
        device = mesh.device
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._sums: list[Tensor] | None = None
        """Sums of this step by row; None between steps."""
        self._bits: dict[FlatParameter, Tensor] = {}
        """Buffers of weights as integers."""
        self._missing: set[FlatParameter] = set()
        odd = [2 * row + 1 if axis.endswith("replicas") else 1 for row, (axis, _) in enumerate(self.rows)]
        numbers = [
            [factor * (axis == of) for factor, (of, _) in zip(odd, self.rows, strict=True)] for axis in COPY_AXES
        ]
        self._factors = torch.tensor(numbers, dtype=torch.int64, device=device)
        coefficients = [coefficient(mesh, axis) for axis in COPY_AXES for _ in range(COPY_PARTS)]
        self._coefficients = torch.tensor(coefficients, dtype=torch.float64, device=device)

    def start_step(self) -> None:
        """Sum the weights of the step that begins."""
        self._sums = [self._zero] * len(self.rows)
        self._missing = {flat for flat, rows in self._of.items() if rows}

    def add(self, flat: FlatParameter) -> None:
        """Sum gathered weights, unless this step has done so."""
        if self._sums is not None and flat in self._missing:
            self._missing.discard(flat)
            for row, spans in self._of[flat]:
                if not spans and flat not in self._bits:  # those of several replicas are padded to whole integers
                    self._bits[flat] = flat.weights.view(torch.int64)
                parts = [flat.weights[span] for span in spans]
                self._sums[row] = sum_of_bits(torch.cat(parts)) if spans else self._bits[flat].sum()

    def add_rest(self) -> None:
        """Sum the weights that stay."""
        for flat in list(self._missing):
            if flat.sharding.stage < 3 or flat in self._unsharder.unsharded:
                self._unsharder.finish(flat)
                self.add(flat)

    def finish_step(self) -> tuple[Tensor, Tensor]:
        """Return the sums by row, and the fp64 numbers [NUMBERS] whose sum over all ranks is 0 if copies are equal."""
        sums = torch.stack(self._sums) if self._sums else self._zero.new_zeros(0)
        self._sums = None
        return sums, (self._factors * sums).sum(1).view(torch.int16) * self._coefficients


def coefficient(mesh: Mesh, axis: str) -> int:
    """Return the factor of this rank's sums along an axis; 0 if it is alone there."""
    if (group := mesh.group(axis)) is None:
        return 0
    place, last = group.ranks.index(mesh.rank), group.size - 1
    return place + 1 if place < last else -last * (last + 1) // 2


def sum_of_bits(values: Tensor) -> Tensor:
    """Return the sum over the bits of a flat tensor as 64-bit integers, modulo 2^64, on its device."""
    rest = values.numel() % (8 // values.element_size())
    if not rest:
        return values.view(torch.int64).sum()
    return values[:-rest].view(torch.int64).sum() + values[-rest:].view(_INTEGERS[values.element_size()]).sum()
