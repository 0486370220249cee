"""Writing of a checkpoint by all ranks together, each the rectangles that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pangu.checkpoint.arena import as_saved
from pangu.checkpoint.files import Slice, Written, commit, discard, start, write_slices
from pangu.collectives.agreement import StuckError, agree_on_long_work
from pangu.common.errors import UserError
from pangu.topology.mesh import Mesh


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
            discard(path)
        raise


def write_own(path: Path, rank: int, slices: Iterable[tuple[str, Slice]], note_progress: Callable[[], None]) -> Written:
    """Write the slices of a rank into a partial checkpoint, and note progress before each of them."""
    return write_slices(path, rank, as_saved(_noting(slices, note_progress)))


def _noting(slices: Iterable[tuple[str, Slice]], note_progress: Callable[[], None]) -> Iterator[tuple[str, Slice]]:
    for part in slices:
        note_progress()
        yield part
