"""Writing of a checkpoint by all ranks together, each the rectangles of logical tensors that it owns."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pangu.checkpoint.files import Slice, Written, commit, partial_of, start, write_slices
from pangu.checkpoint.staging import as_saved
from pangu.collectives.agreement import StuckError, agree_on_long_work
from pangu.common.errors import UserError
from pangu.metrics.progress import with_progress
from pangu.topology.mesh import Mesh
from pangu.zero.flat_parameter import Shard
from pangu.zero.sharded import Owned, ShardedParameters


def weights_of(parameters: ShardedParameters) -> Iterator[tuple[str, Slice]]:
    """Yield the names of logical tensors with the rectangles of their main parameters on this rank."""
    for shard in parameters.shards:
        yield from _rectangles(shard, shard.main)


def state_of(
    parameters: ShardedParameters, optimizer: Optimizer | None, kinds: Collection[str], owned: Owned = False
) -> Iterator[tuple[str, Slice]]:
    """Yield this rank's rectangles as `KIND/NAME`: kind `weight`, the main parameters, or a state of the optimizer.

    States that are not elementwise are left out. `owned`: of ranks that hold the same, only the one that writes it.
    """
    shards = [shard for shard in parameters.shards if not owned or parameters.counts(shard, owned)]
    states = {} if optimizer is None else optimizer.state
    for kind in kinds:
        for shard in shards:
            values = shard.main if kind == "weight" else states.get(shard.main, {}).get(kind)
            if isinstance(values, Tensor) and values.shape == shard.main.shape:
                yield from ((f"{kind}/{name}", part) for name, part in _rectangles(shard, values))


def _rectangles(shard: Shard, values: Tensor) -> Iterator[tuple[str, Slice]]:
    for part, offsets in shard.rectangles(values):
        yield shard.placement.name, Slice(part, shard.placement.shape, offsets)


def write_together(
    mesh: Mesh,
    path: Path,
    slices: Iterable[tuple[str, Slice]],
    facts: Mapping[str, Any],
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint by all ranks, each with its `slices`; raises UserError or StuckError on all if one fails."""
    doing, first = f"writing {path}", mesh.is_first

    def finish(_: Callable[[], None]) -> None:
        before_commit()
        commit(path, written, facts)

    # Three rounds, each on all ranks: the first one makes the partial folder, every rank writes its own file into it,
    # and only when all have, the first one writes the index and renames the folder. A rank that fails fails the round
    # for all, so that no checkpoint is committed without a part, and no older one is deleted for it.
    with discarding(path, first):
        agree_on_long_work(mesh, doing, lambda _: start(path), runs_here=first)
        parts = agree_on_long_work(mesh, doing, partial(write_own, path, mesh.rank, slices), runs_here=True)
        written = [part for part in parts if part is not None]
        agree_on_long_work(mesh, doing, finish, runs_here=first)


@contextmanager
def discarding(path: Path, runs_here: bool) -> Iterator[None]:
    """Delete a partial checkpoint on this rank if the block raises UserError, unless a stuck rank may still write."""
    try:
        yield
    except StuckError:
        raise
    except UserError:
        if runs_here:
            shutil.rmtree(partial_of(path), ignore_errors=True)
        raise


def write_own(path: Path, rank: int, slices: Iterable[tuple[str, Slice]], on_progress: Callable[[], None]) -> Written:
    """Write the slices of a rank into a partial checkpoint, and note progress before each of them."""
    return write_slices(path, rank, as_saved(with_progress(slices, on_progress)))
