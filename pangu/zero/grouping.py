"""Which parameters form a flat parameter, and how it is sharded: numbers, without tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import PlacementTable

F = TypeVar("F")
ALIGNMENT = 32
"""Local shards begin at multiples of this many elements, so that 128-byte loads of fp32 stay aligned."""
IN_FLIGHT = 2
"""Whole gradients of flat parameters that may exist at a time where they are reduced after each micro-batch."""


@dataclass(frozen=True)
class Sharding:
    """How a flat parameter is sharded, and which shards are offloaded."""

    stage: int = 0
    """ZeRO stage: 1 shards main parameters and moments, 2 also the gradients' sums, 3 also the weights."""
    rank: int = 0
    """This rank's index among the `size` that share it."""
    size: int = 1
    """Ranks that share it; 1 at stage 0."""
    replicas: int = 1
    """Ranks that could share it: buffers have the same length at every stage."""
    offload: tuple[str, ...] = ()
    """In host memory: `optimizer`, the main parameters (and hence the moments); `parameters`, at stage 3 the local
    shard of the weights."""
    experts: bool = False
    """Whether it is of experts that the layout splits, which other ranks share."""

    @classmethod
    def of(cls, layout: Layout, at: Coordinates, offload: Collection[str], experts: bool = False) -> Sharding:
        on_host = tuple(what for what in ("optimizer", "parameters") if what in offload)
        # with its parameters on the host even a rank that shares with nobody has to fetch them
        shards, replicas, replica = layout.shards, layout.replicas, layout.replica(at)
        if experts:
            from pangu.topology.experts import ExpertLayout

            apart = ExpertLayout(layout)
            shards, replicas, (_, replica) = apart.shards, apart.replicas, apart.place(at)
        stage = layout.zero if shards > 1 or "parameters" in on_host else 0
        return cls(stage, replica % shards, shards, replicas, on_host, experts)

    def axis(self, name: str) -> str:
        """That of `Layout.peers` for its `replicas`, `shard`, `gather` or `copies`."""
        return f"expert_{name}" if self.experts else name

    def padded(self, numel: int) -> int:
        step = self.replicas * ALIGNMENT if self.replicas > 1 else 1
        return -(-numel // step) * step

    def span(self, padded: int) -> slice:
        length = padded // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


@dataclass(frozen=True)
class Buffer:
    """A row of the table of a flat parameter's buffers."""

    name: str
    """Attribute of `FlatParameter`, where it is documented."""
    numel: int
    wide: bool = False
    """fp32 (fp64 in fp64) rather than the compute format."""
    on_host: bool = False
    alias: str | None = None
    """The buffer that it is, or whose local shard it is; None: separate memory."""
    lasting: bool = True
    """False: it is allocated and freed within a step."""


def buffer_table(padded: int, narrow: bool, sharding: Sharding, trained: bool) -> list[Buffer]:
    """The buffers of a flat parameter of `padded` elements; `narrow`: the model computes in less than fp32."""
    # Which of them are the same memory, for 8 elements on 2 ranks in bf16 (in fp32 main is local, unless offloaded),
    # for the aliases are the sharding: no stage has separate code.
    #
    #     stage   weights   local          total   grad         main
    #     0       8         = weights      8       = total      8
    #     1       8         4 of weights   8       4 of total   4
    #     2       8         4 of weights   comes   4            4
    #     3       comes     4              comes   4            4
    stage, share = sharding.stage, padded // sharding.size
    local_on_host = stage == 3 and "parameters" in sharding.offload
    main_on_host = trained and "optimizer" in sharding.offload
    rounded_on_host = local_on_host or main_on_host
    whole = stage < 2 or sharding.size == 1
    # main parameters are no copy of what is computed with
    beside = trained and (narrow or main_on_host != rounded_on_host)
    rows = [
        Buffer("weights", padded, lasting=stage < 3),
        Buffer("local", share, on_host=local_on_host, alias="weights" if stage < 3 else None),
        Buffer("total", padded * (trained and whole), wide=True),
        Buffer("grad", share * trained, wide=True, alias="total" if whole else None),
        Buffer("host_grad", share * main_on_host, wide=True, on_host=True),
        Buffer("rounded", share, on_host=rounded_on_host, alias="local" if local_on_host == rounded_on_host else None),
        Buffer("main", share, wide=beside, on_host=main_on_host, alias=None if beside else "rounded"),
    ]
    return [row for row in rows if row.numel]


Uses = Mapping[int, Mapping[str, Sequence[str]]]
"""Chunk -> module -> the parameters that it uses."""


def divide(
    table: PlacementTable, uses: Uses, bucket: float, make: Callable[[int, list[str]], F]
) -> tuple[list[F], dict[int, dict[str, list[F]]]]:
    """A rank's flat parameters, made from chunk and parameters, in the order of forward, trained ones first; and chunk
    -> module -> the flat parameters that it uses."""
    flats: list[F] = []
    flat_of: dict[str, F] = {}
    for trained in (True, False):
        chosen = {
            chunk: {module: [n for n in names if table.is_trained(n) == trained] for module, names in of_chunk.items()}
            for chunk, of_chunk in uses.items()
        }
        for chunk, names in _group(table, chosen, bucket):
            flats.append(make(chunk, names))
            flat_of |= dict.fromkeys(names, flats[-1])
    return flats, {
        chunk: {module: list(dict.fromkeys(flat_of[name] for name in names)) for module, names in of_chunk.items()}
        for chunk, of_chunk in uses.items()
    }


@dataclass(frozen=True)
class Regions:
    """What is unsharded one after the other: the modules of a model, such as its layers."""

    uses: Uses
    """Modules in the order of forward."""
    lookups: Collection[str] = ()
    """Tables: their input has no gradient, and backward needs no weights."""
    shared: str = ""
    """The module whose output all others may use."""
    bottom: str = ""
    """The module below which nothing has a gradient."""
    last: str = ""
    """The module whose backward follows its forward."""


def trained_modules(table: PlacementTable, regions: Regions) -> set[str]:
    """Modules whose output has a gradient even if their input has none, because they use something that is trained."""
    trained: set[str] = set()
    for of_chunk in regions.uses.values():
        reaches_all = any(map(table.is_trained, of_chunk.get(regions.shared, ())))
        trained |= {m for m, names in of_chunk.items() if reaches_all or any(map(table.is_trained, names))}
    return trained


def _group(table: PlacementTable, uses: Uses, bucket: float) -> list[tuple[int, list[str]]]:
    """Chunk and parameters of each flat parameter, in the order of forward. Parameters of a module stay together, and
    neighbouring modules of a chunk are joined until they fill the bucket, which must not straddle chunks, since they
    are used at different times. Experts that the layout splits are joined with each other. A parameter that
    another stage has a copy of stands alone, so that it is sharded alike there; so does one of several chunks, which
    belongs to none (-1)."""
    users: dict[str, set[int]] = {}
    for chunk, of_chunk in uses.items():
        for names in of_chunk.values():
            for name in names:
                users.setdefault(name, set()).add(chunk)
    groups: list[tuple[int, list[str]]] = []
    grouped: set[str] = set()
    for chunk, of_chunk in uses.items():
        filling: dict[bool, list[str]] = {}  # of experts or not -> the flat parameter that has room
        sizes = {False: 0.0, True: 0.0}
        for module in of_chunk.values():
            names = [name for name in module if name not in grouped]
            grouped |= set(names)
            alone = [n for n in names if len(users[n]) > 1 or any(p.shared for p in table.stored_in(n))]
            groups += [(chunk if len(users[name]) == 1 else -1, [name]) for name in alone]
            if alone:
                filling.clear()
            for of_experts in (False, True):
                joined = [name for name in names if name not in alone and table.is_expert(name) == of_experts]
                if joined and (of_experts not in filling or sizes[of_experts] >= bucket):
                    filling[of_experts], sizes[of_experts] = [], 0.0
                    groups.append((chunk, filling[of_experts]))
                if joined:
                    filling[of_experts].extend(joined)
                    sizes[of_experts] += sum(4.0 * math.prod(table.shapes[name]) for name in joined)
    return groups


def backward_order(names: Sequence[str], trained: Collection[str], regions: Regions) -> list[str]:
    """The order in which backward enters a chunk's modules, given in the order of forward: the last first, without
    lookup tables, which have no gradient of their input, and without the frozen bottom of the model."""
    order = [name for name in reversed(names) if name not in regions.lookups]
    while order and regions.bottom in names and regions.bottom not in trained and order[-1] not in trained:
        order.pop()
    return order
