"""Does the state of a run hold only finite values?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects, largest
from pangu.training.faults import named_ranks
from pangu.training.saving import MOMENTS
from pangu.training.step import Trainer


def find_not_finite(trainer: Trainer) -> str | None:
    """Which ranks keep which fp32 weights or moments with a value that is not finite, in words; None: there is none.
    The same answer on all ranks.

    No step makes such a value rightly: one whose gradient overflows is skipped, and changes neither weights nor
    moments. Each rank reads what it keeps once, where it lies.
    """
    mesh = trainer.mesh
    mine = _not_finite(_kept(trainer))
    somewhere = largest(torch.tensor(len(mine), dtype=torch.int32, device=mesh.device), mesh.group("world"))
    return named_ranks(gather_objects(mine, mesh.group("world"))) if int(somewhere) else None


def _kept(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """What this rank keeps of weights and moments, flat, under the names of a checkpoint."""
    for shard in trainer.shards:
        yield f"weight/{shard.placement.name}", shard.main
    for shard in trainer.parameters.trained_shards:
        for moment in MOMENTS:
            yield f"{moment}/{shard.placement.name}", trainer.optimizer.state[shard.main][moment]


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors with a value that is not finite.

    What is not finite spreads to the norm, which one fused kernel has for many tensors. The norm of finite values
    overflows as well if they are large enough: those tensors are looked at by themselves.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    found = []
    for group in alike.values():
        fine = torch.stack(torch._foreach_norm([tensor for _, tensor in group])).isfinite().tolist()
        suspects = [named for named, norm_is_finite in zip(group, fine, strict=True) if not norm_is_finite]
        found += [name for name, tensor in suspects if not bool(tensor.isfinite().all())]
    return found
