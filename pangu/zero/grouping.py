"""Which parameters lie together in a unit, and what of it is whose: numbers, without tensors (see `zero.units`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pangu.topology.layout import Layout
from pangu.topology.placement import PlacementTable

U = TypeVar("U")
ALIGNMENT = 32
"""Shares begin at multiples of so many elements, so that 128-byte loads of fp32 stay aligned."""
IN_FLIGHT = 2
"""Whole gradients of a unit that may exist at a time where they are reduced after each micro-batch."""
TABLES = ("embedding", "position_bias")
"""Regions that only look rows up."""


@dataclass(frozen=True)
class Sharding:
    """What is dealt to whom."""

    stage: int = 0
    """ZeRO stage: 1 shards main parameters and moments, 2 also the gradients' sums, 3 also the weights."""
    rank: int = 0
    """Place of this rank among those that share."""
    size: int = 1
    """How many share; 1 at stage 0."""
    replicas: int = 1
    """How many could share: all stages have buffers of the same length."""
    offload: tuple[str, ...] = ()
    """What lies in host memory: `optimizer`, the main parameters (and hence the moments), `parameters`, at stage 3 the
    own share of the weights."""

    @classmethod
    def of(cls, layout: Layout, replica: int, offload: Collection[str]) -> Sharding:
        """That of one replica of a layout; of `offload` what concerns units."""
        away = tuple(what for what in ("optimizer", "parameters") if what in offload)
        # with its parameters on the host even a rank that shares with nobody has to fetch them
        stage = layout.zero if layout.shards > 1 or "parameters" in away else 0
        return cls(stage, replica % layout.shards, layout.shards, layout.data, away)

    def padded(self, numel: int) -> int:
        """Length of the buffer of so many elements."""
        step = self.replicas * ALIGNMENT if self.replicas > 1 else 1
        return -(-numel // step) * step

    def own(self, padded: int) -> slice:
        """This rank's share of a buffer."""
        share = padded // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True)
class Buffer:
    """A row of the table of a unit's buffers."""

    name: str
    """Attribute of `FlatParameter`, where it is described."""
    numel: int
    wide: bool = False
    """Its format: fp32 (fp64 in fp64) rather than the one that the model computes in."""
    away: bool = False
    """It lies in host memory."""
    alias: str | None = None
    """The buffer that it is, or whose own share it is; None: it has memory of its own."""
    lasting: bool = True
    """False: its memory comes and goes."""


def buffer_table(padded: int, narrow: bool, sharding: Sharding, trained: bool) -> list[Buffer]:
    """The buffers of a unit of `padded` elements; `narrow`: the model computes in a format narrower than fp32."""
    stage, share = sharding.stage, padded // sharding.size
    share_away = stage == 3 and "parameters" in sharding.offload
    main_on_host = trained and "optimizer" in sharding.offload
    rounded_away = share_away or main_on_host
    whole = stage < 2 or sharding.size == 1
    beside = trained and (
        narrow or main_on_host != rounded_away
    )  # main parameters are no copy of what is computed with
    rows = [
        Buffer("weights", padded, lasting=stage < 3),
        Buffer("share", share, away=share_away, alias="weights" if stage < 3 else None),
        Buffer("total", padded * (trained and whole), wide=True),
        Buffer("grad", share * trained, wide=True, alias="total" if whole else None),
        Buffer("host_grad", share * main_on_host, wide=True, away=True),
        Buffer("rounded", share, away=rounded_away, alias="share" if share_away == rounded_away else None),
        Buffer("main", share, wide=beside, away=main_on_host, alias=None if beside else "rounded"),
    ]
    return [row for row in rows if row.numel]


Regions = Mapping[int, Mapping[str, Sequence[str]]]
"""Chunk -> region -> the parameters that it uses."""


def divide(
    table: PlacementTable,
    regions: Regions,
    bucket: float,
    frozen: Collection[str],
    make: Callable[[int, list[str], bool], U],
) -> tuple[list[U], dict[int, dict[str, list[U]]]]:
    """A rank's units, each made of its chunk, its parameters and whether these are trained, and chunk -> region -> the
    units that the region uses."""
    units: list[U] = []
    unit_of: dict[str, U] = {}
    for chunk, names, trained in group_parameters(table, regions, bucket, frozen):
        units.append(make(chunk, names, trained))
        unit_of |= dict.fromkeys(names, units[-1])
    uses = {
        chunk: {region: list(dict.fromkeys(unit_of[name] for name in names)) for region, names in of_chunk.items()}
        for chunk, of_chunk in regions.items()
    }
    return units, uses


def group_parameters(
    table: PlacementTable, regions: Regions, bucket: float, frozen: Collection[str]
) -> list[tuple[int, list[str], bool]]:
    """Chunk and parameters of each unit, in the order of the forward pass, and whether they are trained: first the
    trained ones, then the frozen ones."""
    units = []
    for trained in (True, False):
        chosen = {
            chunk: {region: [n for n in names if (n not in frozen) == trained] for region, names in uses.items()}
            for chunk, uses in regions.items()
        }
        units += [(chunk, names, trained) for chunk, names in _group(table, chosen, bucket)]
    return units


def trained_regions(regions: Regions, frozen: Collection[str]) -> set[str]:
    """Regions whose output has a gradient even if their input has none, because something that they use is trained."""
    found: set[str] = set()
    for uses in regions.values():
        biased = any(name not in frozen for name in uses.get("position_bias", ()))
        found |= {region for region, names in uses.items() if biased or any(name not in frozen for name in names)}
    return found


def _group(table: PlacementTable, regions: Regions, bucket: float) -> list[tuple[int, list[str]]]:
    """Chunk and parameters of each unit, in the order of the forward pass.

    Parameters of a region stay together, and neighbouring regions of a chunk are joined until they fill the bucket. A
    parameter that another stage has a copy of is a unit of its own, cut alike there; one that several chunks use
    belongs to none of them (-1).
    """
    users: dict[str, set[int]] = {}
    for chunk, uses in regions.items():
        for names in uses.values():
            for name in names:
                users.setdefault(name, set()).add(chunk)
    units: list[tuple[int, list[str]]] = []
    seen: set[str] = set()
    for chunk, uses in regions.items():
        size = bucket
        for region in uses.values():
            names = [name for name in region if name not in seen]
            seen |= set(names)
            alone = [n for n in names if len(users[n]) > 1 or any(p.shared for p in table.stored_in(n))]
            units += [(chunk if len(users[name]) == 1 else -1, [name]) for name in alone]
            together = [name for name in names if name not in alone]
            if together and (size >= bucket or units[-1][0] != chunk or alone):
                units.append((chunk, []))
                size = 0.0
            if together:
                units[-1][1].extend(together)
                size += sum(4.0 * math.prod(table.shapes[name]) for name in together)
    return units


def backward_order(names: Sequence[str], trained: Collection[str]) -> list[str]:
    """In which order backward opens a chunk's regions, given in the order of forward: the last first, without tables,
    whose gradient does not depend on what is in them, and without what is frozen at the bottom of the model."""
    returning = [name for name in reversed(names) if name not in TABLES]
    while returning and "embedding" in names and "embedding" not in trained and returning[-1] not in trained:
        returning.pop()
    return returning
