"""Meetings of all processes through the store, without a collective, and detection of silent ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pangu.common.errors import SILENCE_SECONDS
from pangu.topology.mesh import BACKGROUND, Mesh

T = TypeVar("T")
A = TypeVar("A")

FAILED = "failed"
"""Key of a background mesh's store: a rank that has failed, so that its peers need not wait for it."""


def meet(mesh: Mesh, value: T, answer: Callable[[list[T]], A]) -> A:
    """Pass the values of all processes to `answer` on rank 0, and return its result on all.

    Each process sets a key; rank 0 reads them all and sets one answer, for which the others wait. Rank 0 returns only
    when all have read it, since the store may end with that process. A process sends six queries, and leaves no key but
    its number of meetings. Raise `DistStoreError` if one is late.
    """
    store, rank, world = mesh.store, mesh.rank, mesh.layout.world
    assert store is not None
    limit = timedelta(seconds=mesh.timeout_s)
    meeting = store.add(f"meetings-{rank}", 1)
    keys = [f"meeting-{meeting}-{rank}" for rank in range(world)]
    answered, count, read = (f"meeting-{meeting}-{name}" for name in ("answer", "count", "read"))
    if rank == 0:
        store.wait(keys[1:], limit)
        result = answer([value, *map(pickle.loads, store.multi_get(keys[1:]))])
        store.set(answered, pickle.dumps(result))  # type: ignore[arg-type]  # typed as str, but bytes work
        store.wait([read], limit)
        for key in (answered, count, read):
            store.delete_key(key)
        return result
    store.set(keys[rank], pickle.dumps(value))  # type: ignore[arg-type]
    store.wait([answered], limit)
    result = pickle.loads(store.get(answered))
    store.delete_key(keys[rank])
    if store.add(count, 1) == world - 1:
        store.set(read, "")
    return result


def silent_ranks(mesh: Mesh) -> list[int]:
    """Return the rank that says it has failed, or those that do not report the same timeout soon after this one."""
    if mesh.store is None:
        return []
    failed = f"{BACKGROUND}/{FAILED}"
    failing = [int(mesh.store.get(failed))] if mesh.store.check([failed]) else []
    mesh.store.set(f"misses-{mesh.rank}", "")
    time.sleep(SILENCE_SECONDS)  # a rank that has failed ends first: the launcher passes on its message and its status
    if failing:
        return failing
    silent = absent(mesh.store, [f"misses-{rank}" for rank in range(mesh.layout.world)])
    return [int(key.removeprefix("misses-")) for key in silent]


def absent(store: dist.Store, keys: list[str]) -> list[str]:
    """Return the keys that are not set, by bisection: few queries if most are set."""
    if store.check(keys):
        return []
    half = len(keys) // 2
    return keys if half == 0 else absent(store, keys[:half]) + absent(store, keys[half:])
