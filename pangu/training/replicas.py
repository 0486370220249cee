"""Replica check: bitwise comparison of state that several ranks hold alike."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.zero.grouping import COPY_AXES

AXES = ("replicas", "expert_replicas", "tensor", "pipeline")
"""Axes along which ranks hold copies."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 1024
"""Columns that a tensor is folded into, so that its digest reads it twice and makes no copy."""
_MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, index of the first element, and shape of a part of a tensor."""


def find_replica_difference(trainer: Trainer) -> str | None:
    """Return a text with tensor, ranks and hosts of copies that differ in any bit, equal on all ranks; None: none do.

    Compared are the compute weights, gathered as for a step at every ZeRO stage, over the replicas and where
    tensor-parallel ranks or stages share them; their fp32 values and the optimizer's moments where several ranks hold
    the same shard; and scales and loads, which are replicated. In a format below fp32 the compute weights are also
    compared with the fp32 values that they are rounded from. All of it was computed from the same numbers by the same
    operations, so that a difference means that a device, its memory or a link is faulty, or that a kernel does not add
    up in a fixed order.
    """
    mesh = trainer.mesh
    digests = _on_host(dict(_digests(trainer)))
    rounded = _on_host(dict(_rounded_digests(trainer)))
    found = [
        f"{name} from element {list(place)} on: {named(mesh, mesh.rank)} computes with other weights than it updates"
        for (name, place, shape), digest in rounded.items()
        if digests[f"local/{name.partition('/')[2]}", place, shape] != digest
    ]
    shared = {key: digest for key, digest in digests.items() if not key[0].startswith("local/")}
    for axis in AXES:
        found += _differences(mesh, axis, shared)
    return _first_text(mesh, found)


def find_weight_difference(trainer: Trainer, sums: Tensor) -> str:
    """Return a text with the ranks whose weights differ according to the `sums` of a step, equal on all ranks."""
    compared = trainer.parameters.unsharder.sums
    assert compared is not None
    mesh, found, values = trainer.mesh, list[str](), sums.tolist()
    for axis in COPY_AXES:
        pairs = zip(compared.rows, values, strict=True)
        found += _differences(mesh, axis, {(name, (), ()): value for (own, name), value in pairs if own == axis})
    without = "the sums that each rank keeps are equal, so the message that compares them was corrupted"
    return _first_text(mesh, found) or without


def _first_text(mesh: Mesh, found: list[str]) -> str | None:
    """Return the first text that any rank has `found`, with the number of others; None: there is none."""
    texts = list(dict.fromkeys(text for texts in gather_objects(found, mesh.group("world")) for text in texts))
    return None if not texts else texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")


def _differences(mesh: Mesh, axis: str, digests: Mapping[Key, Any]) -> Iterator[str]:
    """Yield a text for each part of a tensor whose copies along an axis differ, given this rank's digests."""
    if (group := mesh.group(axis)) is None:
        return
    rows = dict(zip(group.ranks, gather_objects(digests, group), strict=True))
    for key in dict.fromkeys(key for row in rows.values() for key in row):
        copies = {rank: row[key] for rank, row in rows.items() if key in row}
        if len(set(copies.values())) < 2:
            continue
        (common, count), *_ = Counter(copies.values()).most_common()
        most = 2 * count > len(copies)  # of two copies nobody knows which one is right
        wrong = [rank for rank, digest in copies.items() if digest != common] if most else list(copies)
        ranks = ", ".join(named(mesh, rank) for rank in wrong)
        others = "the other copies" if most else "each other"
        place = f" from element {list(key[1])} on" if key[1] else ""
        yield f"{key[0]}{place}: {ranks} ({axis} axis) from {others}"


def named(mesh: Mesh, rank: int) -> str:
    """Return a rank and its host as text."""
    return mesh.named([rank]) if mesh.hosts else f"rank {rank} on {socket.gethostname()}"


def _digests(trainer: Trainer) -> Iterator[tuple[Key, Tensor]]:
    """Yield the digest of all state of this rank; all ranks call this together, since weights are gathered."""
    for name, part in trainer.state():
        yield (name, part.offsets, tuple(part.tensor.shape)), _digest(part.tensor)
    parameters = trainer.parameters
    for flat in parameters.flat_parameters:
        with parameters.unsharder.gathered(flat) as weights:
            for name, span in flat.tensors:
                placement = parameters.stage.table[name]
                if placement.local_numel:
                    yield (f"computing/{name}", placement.offsets, placement.local_shape), _digest(weights[span])
    for flat in parameters.trained if trainer.config.precision.compute in ("bf16", "fp16") else ():
        for shard in flat.shards:
            begin = shard.main.storage_offset() - flat.main.storage_offset()
            local = flat.local[begin : begin + shard.main.numel()]
            yield (f"local/{shard.placement.name}", (shard.start,), (local.numel(),)), _digest(local)
    alike = {"loss scale": trainer.loss_scale.scale}
    if trainer.scales is not None:
        alike["fp8 scales"] = trainer.scales.scale
    if trainer.balance is not None:
        alike |= {"experts/bias": trainer.balance.bias, "experts/shares": trainer.balance.shares}
    for name, tensor in alike.items():
        yield (name, (0,), tuple(tensor.shape)), _digest(tensor)


def _rounded_digests(trainer: Trainer) -> Iterator[tuple[Key, Tensor]]:
    """Yield the digest that each shard of the compute weights must have, according to the fp32 values."""
    if trainer.config.precision.compute not in ("bf16", "fp16"):
        return  # they are the same memory, or a copy of it
    for flat in trainer.parameters.trained:
        for shard in flat.shards:
            key = (f"computing/{shard.placement.name}", (shard.start,), (shard.main.numel(),))
            yield key, _digest(shard.main.to(flat.local.dtype))


def _on_host(digests: Mapping[Key, Tensor]) -> dict[Key, tuple[int, ...]]:
    """Return the digests as integers, with a single device-to-host copy per device."""
    found: dict[Key, tuple[int, ...]] = {}
    for device in {digest.device for digest in digests.values()}:
        there = {key: digest for key, digest in digests.items() if digest.device == device}
        found |= {key: tuple(row) for key, row in zip(there, torch.stack([*there.values()]).tolist(), strict=True)}
    return {key: found[key] for key in digests}


def _digest(tensor: Tensor) -> Tensor:
    """Return three sums over the bits of a tensor, modulo 2^64, on its device: exact, hence independent of the order.

    A flipped bit changes the first sum by a power of two. The others weight the elements by row and by column of the
    folded tensor, and so find errors that cancel there, such as swapped elements.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    per_number = 8 // flat.element_size()
    if flat.storage_offset() % per_number:
        flat = flat.clone()  # eight bytes are read at a time
    end = len(flat) // (per_number * _WIDTH) * per_number * _WIDTH
    folded = flat[:end].view(torch.int64).view(-1, _WIDTH)
    rest = flat[end:].view(_INTEGERS[flat.element_size()]).to(torch.int64)
    rows, columns = folded.sum(1, dtype=torch.int64), folded.sum(0, dtype=torch.int64)
    rows, columns = torch.cat([rows, rest.sum().view(1)]), torch.cat([columns, rest])
    return torch.stack([columns.sum(), (rows * _weights(rows)).sum(), (columns * _weights(columns)).sum()])


def _weights(sums: Tensor) -> Tensor:
    return (2 * torch.arange(len(sums), device=sums.device) + 1) * _MULTIPLIER
