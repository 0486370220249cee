"""Exchanges of Muon: gather each matrix on the rank that owns it, orthogonalize, scatter, see `muon_schedule`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from pangu.collectives.exchange import start_exchange
from pangu.config.optimizer import MuonConfig
from pangu.layers.builder import DTYPES
from pangu.optim.newton_schulz import orthogonalize
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement
from pangu.topology.recorder import AxisGroup
from pangu.zero.muon_schedule import Round, RoundStep, matrix_rounds, publications, steps_of
from pangu.zero.stage_parameters import FlatSpec, StageParameters


class MuonExchange:
    """Exchanges that gather each matrix of a stage on one rank, which orthogonalizes it, and scatter the result."""

    def __init__(
        self,
        stage: StageParameters,
        mesh: Mesh,
        compute: str,
        config: MuonConfig,
        publish: Callable[[Sequence[FlatSpec]], None],
    ) -> None:
        """Prepare the exchanges; `compute`: compute format; `publish`: function that publishes updated weights."""
        # fp16 has too small a range for messages and iterations
        self._dtype = DTYPES["bf16" if compute == "fp16" else compute]
        self._steps, self._mesh = config.ns_steps, mesh
        self._rounds = [
            (one, mesh.group("expert_shard" if experts else "shard"), mesh.group("tensor"))
            for experts, rounds in matrix_rounds(stage, config.split_heads).items()
            for one in rounds
        ]
        rounds = [one for one, *_ in self._rounds]
        self._order, self._publish, self._published = steps_of(rounds), publish, publications(stage, rounds)

    def orthogonalizer(self, placements: Sequence[Placement]) -> Callable[[list[Tensor]], Iterator[list[int]]]:
        """Return a function that replaces shards, which belong to these placements, by those of the results.

        It yields the indices of shards that are replaced, and publishes weights that they complete. All other tensors
        must be updated before.
        """
        indices = {placement.name: index for index, placement in enumerate(placements)}

        def replace_all(shards: list[Tensor]) -> Iterator[list[int]]:
            held = {name: shards[index] for name, index in indices.items()}
            rounds = [self._steps_of(*one, held) for one in self._rounds]
            published = self._published
            self._publish(published[0])
            for number, step in self._order:
                next(rounds[number], None)
                if step is RoundStep.FINISH:
                    names = {matrix.placement.name for matrix in self._rounds[number][0].matrices}
                    yield [index for name, index in indices.items() if name in names]
                    self._publish(published[1 + number])

        return replace_all

    def _steps_of(
        self, one: Round, shard: AxisGroup | None, tensor: AxisGroup | None, held: Mapping[str, Tensor]
    ) -> Iterator[RoundStep]:
        """Take one step of a round at a time, and yield all but the last; shards in `held` become those of results."""
        tensor = tensor if one.cuts else None
        names, ranks = [m.placement.name for m in one.gathered], range(one.cut.size)
        owned = [m for m in one.cuts if m.tensor == one.cut.rank]
        arrive = self._start(sent := self._shards_of(one, held), one.pieces[1], shard)
        yield RoundStep.SEND
        slices = dict(zip(names, map(_joined, zip(*arrive(), strict=True)), strict=True))
        del arrive  # and what has arrived
        owners = [[m.placement.name for m in one.cuts if m.tensor == rank] for rank in ranks]
        arrive = self._start([[slices.pop(name) for name in of] for of in owners], one.slices[1], tensor)
        yield RoundStep.JOIN
        joined = [
            torch.cat([part.view(m.placement.local_shape) for part in rank_parts], m.placement.cut_dim or 0)
            for m, *rank_parts in zip(owned, *arrive(), strict=True)
        ]
        del arrive
        yield RoundStep.ARRIVE
        matrices = zip((*(m for m in one.gathered if not m.is_cut), *owned), (*slices.values(), *joined), strict=True)
        orthogonalize([*chain(*(matrix.view(-1, *m.shape) for m, matrix in matrices))], self._steps)
        yield RoundStep.ITERATE
        cut = [matrix.chunk(one.cut.size, m.placement.cut_dim or 0) for m, matrix in zip(owned, joined, strict=True)]
        arrive = self._start([*zip(*cut, strict=True)] or [[] for _ in ranks], one.slices[0], tensor)
        del joined, cut, matrices
        yield RoundStep.SPLIT
        slices |= zip(chain(*owners), chain(*arrive()), strict=True)
        back = [[slices[m.placement.name][m.pieces[rank]] for m in one.gathered] for rank in one.ranks]
        arrive = self._start(back, one.pieces[0], shard)
        del slices, back
        yield RoundStep.RETURN
        for part, result in zip(chain(*sent), chain(*arrive()), strict=True):
            part.copy_(result)

    def _shards_of(self, one: Round, held: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return this rank's shards of a round's matrices by owner; shards without an element are empty."""
        none = torch.empty(0, dtype=self._dtype, device=self._mesh.device)
        pieces = [(m.shard, held.get(m.placement.name, none)) for m in one.matrices]
        return [[part for shard, part in pieces if shard == rank] for rank in one.ranks]

    def _start(
        self, to_each: Sequence[Sequence[Tensor]], from_each: Sequence[Sequence[int]], group: AxisGroup | None
    ) -> Callable[[], list[list[Tensor]]]:
        """Start to send tensors to each rank; return a function that waits for flat tensors of these sizes."""
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
