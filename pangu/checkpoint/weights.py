"""The weights of a checkpoint, read by all ranks of a mesh together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pangu.checkpoint.files import Slice, load, require_fit
from pangu.checkpoint.index import NewerFormatError, find_damage, read_index
from pangu.collectives.reduce import gather_objects
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh


def damage(path: Path, mesh: Mesh) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks; each reads its share of the files. Raises
    NewerFormatError on all ranks."""
    newer = None
    try:
        lines = find_damage(path, read_index(path), mesh.rank, mesh.layout.world)
    except NewerFormatError as error:
        lines, newer = [], str(error)
    except UserError as error:
        lines = [str(error)]
    answers = gather_objects((lines, newer), mesh.group("world"))
    for _, newer in answers:
        if newer is not None:
            raise NewerFormatError(newer)
    return list(dict.fromkeys(line for lines, _ in answers for line in lines))


def intact(path: Path, mesh: Mesh) -> Path:
    """`path`. Raises UserError on all ranks unless it is an undamaged checkpoint."""
    if lines := damage(path, mesh):
        raise UserError("\n".join(lines))
    return path


def load_weights(path: Path, mesh: Mesh, weights: Iterable[tuple[str, Slice]]) -> dict[str, Any]:
    """Fill this rank's slices of a model with the weights of a checkpoint, nothing else; returns its index. The ranks
    of `mesh` together hold all tensors. Raises UserError on all of them if the checkpoint is damaged, or naming every
    tensor that only one of the two has or whose shape differs."""
    index = read_index(intact(path, mesh))
    slices = [(f"weight/{name}", part) for name, part in weights]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in gather_objects({name: slice_.shape for name, slice_ in slices}, mesh.group("world")):
        shapes |= part
    require_fit(path, index, shapes, "weight")
    load(path, index, slices)
    return index
