"""Do ranks that hold copies of the same weights hold the same ones?"""

from __future__ import annotations

import hashlib

import torch

from pangu.checkpoint.files import Slice
from pangu.collectives.reduce import gather_objects
from pangu.training.saving import MOMENTS, moments_of, weights_of
from pangu.training.step import Trainer


def find_difference(trainer: Trainer) -> str | None:
    """The first tensor whose copies differ in any bit, and the ranks that hold them; the same answer on all ranks.

    Compared are the fp32 weights and the optimizer's moments: of all tensors over the replicas, unless ZeRO deals them
    out, of those that are not cut over the tensor-parallel ranks, and of those that several stages have. They were
    computed from the same numbers by the same operations, so that a difference means that a device, its memory or a
    link is wrong, or that some kernel does not add up in the same order each time.
    """
    mesh = trainer.mesh
    kinds = {"weight": weights_of(trainer)}
    if trainer.step > trainer.skipped:
        kinds |= {moment: moments_of(trainer, moment) for moment in MOMENTS}
    mine = {
        (f"{kind}/{name}", part.offsets, tuple(part.tensor.shape)): _digest(part)
        for kind, parts in kinds.items()
        for name, part in parts
    }
    found = None
    for axis in ("tensor", "data", "pipeline"):
        ranks = mesh.layout.peers(mesh.rank, axis)
        for rank, theirs in zip(ranks, gather_objects(mine, mesh.group(axis)), strict=True):
            for key, digest in mine.items():
                if found is None and theirs.get(key, digest) != digest:
                    found = f"{key[0]} from element {list(key[1])} on: ranks {mesh.rank} and {rank} ({axis} axis)"
    return next((one for one in gather_objects(found, mesh.group("world")) if one is not None), None)


def _digest(part: Slice) -> bytes:
    return hashlib.sha256(part.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
