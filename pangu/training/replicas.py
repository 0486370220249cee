"""The replica check: what several ranks hold alike is compared."""

from __future__ import annotations

import hashlib

import torch

from pangu.checkpoint.files import Slice
from pangu.collectives.reduce import gather_objects
from pangu.training.saving import state_of
from pangu.training.step import Trainer


def find_replica_difference(trainer: Trainer) -> str | None:
    """The first tensor whose copies differ in any bit, and the ranks that hold them; the same answer on all ranks.

    Compared are the fp32 weights and the optimizer's moments: of all tensors over the replicas, unless ZeRO shards
    them, of those that are not cut over the tensor-parallel ranks, and of those that several stages have. They were
    computed from the same numbers by the same operations, so that a difference means that a device, its memory or a
    link is wrong, or that some kernel does not add up in the same order each time.
    """
    mesh = trainer.mesh
    digests = {(name, part.offsets, tuple(part.tensor.shape)): _digest(part) for name, part in state_of(trainer)}
    difference = None
    for axis in ("tensor", "replicas", "expert_replicas", "pipeline"):
        if (group := mesh.group(axis)) is None:
            continue
        for rank, of_rank in zip(group.ranks, gather_objects(digests, group), strict=True):
            for key, digest in digests.items():
                if difference is None and of_rank.get(key, digest) != digest:
                    place = f"{key[0]} from element {list(key[1])} on"
                    difference = f"{place}: {mesh.named([mesh.rank, rank])} ({axis} axis)"
    return next((text for text in gather_objects(difference, mesh.group("world")) if text is not None), None)


def _digest(part: Slice) -> bytes:
    return hashlib.sha256(part.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
