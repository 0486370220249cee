"""Exchange of the matrices of Muon, whose shards come together on their home ranks, see `homes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from pangu.collectives.exchange import start_exchange
from pangu.config.optimizer import MuonConfig
from pangu.layers.builder import DTYPES
from pangu.optim.newton_schulz import orthogonalize
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement
from pangu.topology.recorder import AxisGroup
from pangu.zero.homes import Round, matrix_rounds
from pangu.zero.stage_parameters import StageParameters


class WholeMatrices:
    """Matrices of a rank's stage, which are orthogonalized whole, each on one rank."""

    def __init__(self, stage: StageParameters, mesh: Mesh, compute: str, config: MuonConfig) -> None:
        """Prepare the exchanges; `compute`: compute format."""
        # fp16 has too small a range for messages and iterations
        self._dtype = DTYPES["bf16" if compute == "fp16" else compute]
        self._steps, self._mesh = config.ns_steps, mesh
        self._rounds = [
            (one, mesh.group("expert_shard" if experts else "shard"), mesh.group("tensor"))
            for experts, rounds in matrix_rounds(stage, config.split_heads).items()
            for one in rounds
        ]

    def over(self, placements: Sequence[Placement]) -> Callable[[list[Tensor]], None]:
        """Return a function that replaces shards, which belong to these placements, by those of the results."""
        names = [placement.name for placement in placements]

        def replace_all(shards: list[Tensor]) -> None:
            held = dict(zip(names, shards, strict=True))
            following = iter(self._rounds)
            in_flight = [self._send(one, shard, held) for one, shard, _ in islice(following, 1)]
            for one, shard, tensor in self._rounds:
                sent, arrive = in_flight.pop()
                slices = [_joined(parts) for parts in zip(*arrive(), strict=True)]
                del arrive  # and what has arrived
                # the exchange of the next round overlaps the iterations of this one
                in_flight += [self._send(other, group, held) for other, group, _ in islice(following, 1)]
                self._orthogonalize(one, tensor, slices)
                self._return(one, shard, slices, sent)
                del slices

        return replace_all

    def _return(
        self, one: Round, group: AxisGroup | None, slices: Sequence[Tensor], shards: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send slices of the results from their homes, and replace shards by what arrives."""
        back = [[part[m.pieces[r]] for m, part in zip(one.gathered, slices, strict=True)] for r in one.ranks]
        results = self._start(back, one.pieces[0], group)()
        for part, result in zip(chain.from_iterable(shards), chain.from_iterable(results), strict=True):
            part.copy_(result)

    def _send(
        self, one: Round, group: AxisGroup | None, held: dict[str, Tensor]
    ) -> tuple[list[list[Tensor]], Callable[[], list[list[Tensor]]]]:
        """Start to send this rank's shards to their homes; return them by home, and `_start`'s function."""
        none = torch.empty(0, dtype=self._dtype, device=self._mesh.device)
        pieces = [held.get(matrix.placement.name, none) for matrix in one.matrices]
        sent = [[part for m, part in zip(one.matrices, pieces, strict=True) if m.shard == rank] for rank in one.ranks]
        return sent, self._start(sent, one.pieces[1], group)

    def _orthogonalize(self, one: Round, group: AxisGroup | None, slices: list[Tensor]) -> None:
        """Replace slices of matrices by those of the results."""
        whole = [part.view(-1, *m.shape) for m, part in zip(one.gathered, slices, strict=True) if not m.is_cut]
        if not one.cuts:
            orthogonalize([*chain(*whole)], self._steps)
            return
        parts = [part for m, part in zip(one.gathered, slices, strict=True) if m.is_cut]
        ranks, at_home = range(one.cut.size), [m for m in one.cuts if m.tensor == one.cut.rank]
        sent = [[part for m, part in zip(one.cuts, parts, strict=True) if m.tensor == rank] for rank in ranks]
        joined = [
            torch.cat([part.view(m.placement.local_shape) for part in of_ranks], m.placement.cut_dim or 0)
            for m, *of_ranks in zip(at_home, *self._start(sent, one.slices[1], group)(), strict=True)
        ]
        whole += [matrix.view(-1, *m.shape) for m, matrix in zip(at_home, joined, strict=True)]
        orthogonalize([*chain(*whole)], self._steps)
        cut = [matrix.chunk(one.cut.size, m.placement.cut_dim or 0) for m, matrix in zip(at_home, joined, strict=True)]
        results = self._start([*zip(*cut, strict=True)] or [[] for _ in ranks], one.slices[0], group)()
        for part, result in zip(chain.from_iterable(sent), chain.from_iterable(results), strict=True):
            part.copy_(result)

    def _start(
        self, to_each: Sequence[Sequence[Tensor]], from_each: Sequence[Sequence[int]], group: AxisGroup | None
    ) -> Callable[[], list[list[Tensor]]]:
        """Start to send tensors to each rank; return a function that waits for its flat ones, of these sizes."""
        if group is None:
            return lambda: [
                [part.reshape(-1).to(self._mesh.device, self._dtype) for part in parts] for parts in to_each
            ]
        numels, received = [[part.numel() for part in parts] for parts in to_each], [*map(sum, from_each)]
        rows, arrived = (
            torch.empty(n, dtype=self._dtype, device=self._mesh.device) for n in (sum(map(sum, numels)), sum(received))
        )
        for part, place in zip(chain(*to_each), rows.split([*chain(*numels)]), strict=True):
            place.view(part.shape).copy_(part)
        handle = start_exchange(arrived, rows, received, [*map(sum, numels)], group)

        def arrive() -> list[list[Tensor]]:
            handle.wait()
            chunks = arrived.split(received)
            return [list(chunk.split(list(each))) for chunk, each in zip(chunks, from_each, strict=True)]

        return arrive


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
