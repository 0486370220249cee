"""Buffer sizes of flat parameters in bytes, and the collectives that use the buffers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, cast

from pangu.schedule.spans import Axis, Collective
from pangu.topology.placement import PlacementTable
from pangu.zero.grouping import Sharding
from pangu.zero.stage_parameters import FlatSpec
from pangu.zero.states import Formats

GRAIN = 512
"""Allocation granularity in bytes: device allocators round up to multiples of it."""


def allocated(nbytes: float) -> int:
    """Return the bytes of a tensor, rounded up as the device's allocator does."""
    return -(-int(nbytes) // GRAIN) * GRAIN


class Buffers(NamedTuple):
    """Transient buffers of a flat parameter, in bytes, and the collectives that use them."""

    weights: int
    """Gathered weights, and their casts to fp8; 0 if they are persistent."""
    total: int
    """Accumulated gradients; 0 if they are persistent."""
    message: int
    """Copy of the gradient sum in the communication format; 0 if the sum itself is sent."""
    part: int
    """Local shard of the reduced gradients; 0 if they are reduced into a persistent buffer."""
    norms: int
    """Norms of the gradients of a reduction, kept until the end of the step."""
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    fetched: float
    """Bytes copied from host memory for each gather."""


class Shards(NamedTuple):
    """Logical tensors of a flat parameter that a rank's shard contains."""

    numels: tuple[int, ...]
    """Elements of each tensor in the local shard, for the tensors that have some."""
    others: tuple[int, ...]
    """Elements of the tensors among them that Muon does not orthogonalize."""
    num_tensors: int
    """Number of tensors in the full buffer."""
    partial: int
    """Elements of the local shard whose gradients are summed over the tensor-parallel ranks."""
    shared: frozenset[str]
    """Axes along which other ranks hold copies of tensors in the local shard."""

    @classmethod
    def of(cls, flat: FlatSpec, table: PlacementTable) -> Shards:
        """Return the shards of a flat parameter."""
        held = [(entry, span.stop - span.start) for entry, span, _ in flat.shard_ranges(table)]
        shared = frozenset(entry.shared for entry, _ in held if entry.shared)
        partial = sum(numel for entry, numel in held if entry.partial)
        others = tuple(numel for entry, numel in held if not entry.is_matrix)
        num_tensors = sum(len(table.stored_in(name)) for name in flat.names)
        return cls(tuple(numel for _, numel in held), others, num_tensors, partial, shared)


def buffers_of(flat: FlatSpec, num_tensors: int, formats: Formats, reduce_each: bool) -> Buffers:
    """Return the transient buffers and collectives of a flat parameter with `num_tensors` logical tensors."""
    sharding, padded = flat.sharding, flat.padded
    size, replicas, share = sharding.size, sharding.replicas, flat.padded // sharding.size
    rows = flat.buffers(formats.weights < formats.sums)
    transient = (row for row in rows.values() if row.name in ("weights", "casts") and not row.lasting)
    weights = sum(allocated(row.numel * formats.itemsize(row)) for row in transient)
    gathers = (Collective("all_gather", axis_of(sharding, "gather"), padded * formats.weights),) * (size > 1)
    fetched = share * formats.weights * rows["local"].on_host
    if not flat.trained:
        return Buffers(weights, 0, 0, 0, 0, gathers, (), fetched)
    sent = formats.messages if replicas > 1 else formats.sums
    narrower = sent < formats.sums
    total = 0 if "total" in rows else allocated(padded * formats.sums)
    if size == 1:
        message, part = 0, allocated(padded * sent) * narrower
        reductions = [Collective("all_reduce", axis_of(sharding, "replicas"), padded * sent)] * (replicas > 1)
    else:
        message, part = allocated(padded * sent) * narrower, allocated(share * sent) * (reduce_each or narrower)
        reductions = [Collective("reduce_scatter", axis_of(sharding, "shard"), padded * sent)]
        reductions += [Collective("all_reduce", axis_of(sharding, "copies"), share * sent)] * (size < replicas)
    return Buffers(weights, total, message, part, allocated(1) * num_tensors, gathers, tuple(reductions), fetched)


def axis_of(sharding: Sharding, name: str) -> Axis:
    """Return the mesh axis along which a flat parameter is communicated."""
    return cast(Axis, sharding.axis(name))


def lasting_bytes(flat: FlatSpec, moments: Collection[int], formats: Formats) -> int:
    """Return the device bytes of a flat parameter that persist across steps; `moments`: elements of each moment."""
    rows = flat.buffers(formats.weights < formats.sums)
    own = (row for row in rows.values() if row.alias is None and row.lasting and not row.on_host)
    lasting = sum(allocated(row.numel * formats.itemsize(row)) for row in own)
    on_device = flat.trained and not flat.main_on_host
    return lasting + on_device * sum(allocated(numel * formats.moments) for numel in moments)


def copied_bytes(flat: FlatSpec, formats: Formats) -> float:
    """Return the bytes an update copies between device and host: gradients to the host, updated weights back."""
    if not flat.trained:
        return 0.0
    rows = flat.buffers(narrow=True)
    published = rows["rounded"].on_host != rows["local"].on_host
    return flat.padded // flat.sharding.size * (formats.sums * flat.main_on_host + formats.weights * published)
