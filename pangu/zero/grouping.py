"""Grouping of parameters into flat parameters, and their sharding, from sizes alone, without tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import PlacementTable

F = TypeVar("F")
ALIGNMENT = 32
"""Alignment of local shards, in elements, so that 128-byte loads of fp32 stay aligned."""
COPY_AXES = ("replicas", "expert_replicas", "tensor", "ends", "pipeline")
"""Axes along which ranks hold copies of weights."""
COPY_PARTS = 4
"""Numbers of each of these axes in the message that compares the copies (`weight_sums`)."""
IN_FLIGHT = 2
"""Maximum number of full unreduced gradients of flat parameters at a time, if reduced after each micro-batch."""


@dataclass(frozen=True)
class Sharding:
    """Sharding and offload of a flat parameter."""

    stage: int = 0
    """ZeRO stage: 1 shards main parameters and moments, 2 also the gradient sums, 3 also the weights."""
    rank: int = 0
    """Index of this rank among the `size` ranks that share the flat parameter."""
    size: int = 1
    """Number of ranks that share the flat parameter; 1 at stage 0."""
    replicas: int = 1
    """Number of ranks that could share it, which makes buffers equally long at every stage."""
    offload: tuple[str, ...] = ()
    """Host-memory states: `optimizer` (main parameters and moments), `parameters` (weight shards of stage 3)."""
    experts: bool = False
    """True if it holds experts that the layout splits, which are sharded over other ranks."""

    @classmethod
    def of(cls, layout: Layout, at: Coordinates, offload: Collection[str], experts: bool = False) -> Sharding:
        """Return the sharding of the rank at these coordinates."""
        on_host = tuple(what for what in ("optimizer", "parameters") if what in offload)
        # a rank that shares with no other still has to fetch its parameters from the host
        shards, replicas, replica = layout.shards, layout.replicas, layout.replica(at)
        if experts:
            apart = ExpertLayout(layout)
            shards, replicas, (_, replica) = apart.shards, apart.replicas, apart.place(at)
        stage = layout.zero if shards > 1 or "parameters" in on_host else 0
        return cls(stage, replica % shards, shards, replicas, on_host, experts)

    def axis(self, name: str) -> str:
        """Return the axis of `Layout.peers` for its `replicas`, `shard`, `gather` or `copies`."""
        return f"expert_{name}" if self.experts else name

    def padded(self, numel: int) -> int:
        """Return the padded length of a buffer with `numel` elements."""
        step = self.replicas * ALIGNMENT if self.replicas > 1 else 1
        return -(-numel // step) * step

    def span(self, padded: int) -> slice:
        """Return the range of the local shard in a buffer of `padded` elements."""
        length = padded // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


@dataclass(frozen=True)
class Buffer:
    """Row of the buffer table of a flat parameter."""

    name: str
    numel: int
    wide: bool = False
    """True for fp32 (fp64 in fp64) rather than the compute dtype."""
    fp8: bool = False
    """True for fp8."""
    on_host: bool = False
    alias: str | None = None
    """Name of the buffer that this is, or whose local shard it is; None: separate memory."""
    lasting: bool = True
    """False if it is allocated and freed within a step."""


def buffer_table(padded: int, narrow: bool, sharding: Sharding, trained: bool, casts: int = 0) -> list[Buffer]:
    """Return the buffers of a flat parameter of `padded` elements; `narrow`: the compute dtype is below fp32."""
    # `casts`: elements of its matrices in fp8, transposed ones included, which live as long as `weights`.
    # Aliases are all there is to ZeRO: no stage has separate code. Elements per buffer for 8 elements on 2 ranks in
    # bf16 (in fp32 main is local, unless offloaded); a transient buffer is allocated and freed within a step:
    #
    #    stage   weights     local          total       grad         main
    #    0       8           = weights      8           = total      8
    #    1       8           4 of weights   8           4 of total   4
    #    2       8           4 of weights   transient   4            4
    #    3       transient   4              transient   4            4
    stage, share = sharding.stage, padded // sharding.size
    local_on_host = stage == 3 and "parameters" in sharding.offload
    main_on_host = trained and "optimizer" in sharding.offload
    rounded_on_host = local_on_host or main_on_host
    whole = stage < 2 or sharding.size == 1
    # main parameters have memory of their own if they differ from the weights in dtype or device
    has_own_main = trained and (narrow or main_on_host != rounded_on_host)
    rows = [
        Buffer("weights", padded, lasting=stage < 3),
        Buffer("casts", casts, fp8=True, lasting=stage < 3),
        Buffer("local", share, on_host=local_on_host, alias="weights" if stage < 3 else None),
        Buffer("total", padded * (trained and whole), wide=True),
        Buffer("grad", share * trained, wide=True, alias="total" if whole else None),
        Buffer("host_grad", share * main_on_host, wide=True, on_host=True),
        Buffer("rounded", share, on_host=rounded_on_host, alias="local" if local_on_host == rounded_on_host else None),
        Buffer("main", share, wide=has_own_main, on_host=main_on_host, alias=None if has_own_main else "rounded"),
    ]
    return [row for row in rows if row.numel]


Uses = Mapping[int, Mapping[str, Sequence[str]]]
"""Chunk -> module -> names of the parameters that it uses."""


def divide(
    table: PlacementTable, uses: Uses, bucket: float, make: Callable[[int, list[str]], F]
) -> tuple[list[F], dict[int, dict[str, list[F]]]]:
    """Return a rank's flat parameters in forward order, trained ones first, and chunk -> module -> flat parameters."""
    flats: list[F] = []
    flat_of: dict[str, F] = {}
    for trained in (True, False):
        chosen = {
            chunk: {module: [n for n in names if table.is_trained(n) == trained] for module, names in modules.items()}
            for chunk, modules in uses.items()
        }
        for chunk, names in _group(table, chosen, bucket):
            flats.append(make(chunk, names))
            flat_of |= dict.fromkeys(names, flats[-1])
    return flats, {
        chunk: {module: list(dict.fromkeys(flat_of[name] for name in names)) for module, names in modules.items()}
        for chunk, modules in uses.items()
    }


@dataclass(frozen=True)
class Regions:
    """Modules of a model, such as its layers, that are unsharded one after the other."""

    uses: Uses
    """Modules by chunk, in the order of the forward pass, with their parameters."""
    lookups: Collection[str] = ()
    """Embedding tables: their input has no gradient, and their backward pass needs no weights."""
    shared: str = ""
    """Name of the module whose output all others may use."""
    bottom: str = ""
    """Name of the module below which nothing has a gradient."""
    last: str = ""
    """Name of the module whose backward pass directly follows its forward pass."""


def trained_modules(table: PlacementTable, regions: Regions) -> set[str]:
    """Return the modules whose output has a gradient even if their input has none, as they use trained parameters."""
    trained: set[str] = set()
    for modules in regions.uses.values():
        reaches_all = any(map(table.is_trained, modules.get(regions.shared, ())))
        trained |= {m for m, names in modules.items() if reaches_all or any(map(table.is_trained, names))}
    return trained


def _group(table: PlacementTable, uses: Uses, bucket: float) -> list[tuple[int, list[str]]]:
    """Return chunk and parameters of each flat parameter, in the order of the forward pass."""
    # Parameters of a module stay together. Neighboring modules of a chunk are joined until they fill the bucket, but
    # not across chunks, which are used at different times. Split experts are joined with each other only. A parameter
    # with a copy on another stage stays alone, so that both are sharded alike; so does one of several chunks (chunk
    # -1).
    users: dict[str, set[int]] = {}
    for chunk, modules in uses.items():
        for names in modules.values():
            for name in names:
                users.setdefault(name, set()).add(chunk)
    groups: list[tuple[int, list[str]]] = []
    grouped: set[str] = set()
    for chunk, modules in uses.items():
        filling: dict[bool, list[str]] = {}  # is_expert -> the flat parameter being filled
        sizes = {False: 0.0, True: 0.0}
        for module in modules.values():
            names = [name for name in module if name not in grouped]
            grouped |= set(names)
            alone = [n for n in names if len(users[n]) > 1 or any(p.shared for p in table.stored_in(n))]
            groups += [(chunk if len(users[name]) == 1 else -1, [name]) for name in alone]
            if alone:
                filling.clear()
            for are_experts in (False, True):
                joined = [name for name in names if name not in alone and table.is_expert(name) == are_experts]
                if joined and (are_experts not in filling or sizes[are_experts] >= bucket):
                    filling[are_experts], sizes[are_experts] = [], 0.0
                    groups.append((chunk, filling[are_experts]))
                if joined:
                    filling[are_experts].extend(joined)
                    sizes[are_experts] += sum(4.0 * math.prod(table.shapes[name]) for name in joined)
    return groups


def backward_order(names: Sequence[str], trained: Collection[str], regions: Regions) -> list[str]:
    """Return the order in which the backward pass enters the modules of a chunk, which are given in forward order."""
    # Lookup tables have no gradient of their input, and the frozen bottom of the model has none at all.
    order = [name for name in reversed(names) if name not in regions.lookups]
    while order and regions.bottom in names and regions.bottom not in trained and order[-1] not in trained:
        order.pop()
    return order
