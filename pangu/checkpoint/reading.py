"""Reading of checkpoints: tensors under any layout, by all ranks of a mesh together, and the trained model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pangu.checkpoint.files import Slice, list_with_status
from pangu.checkpoint.index import NewerFormatError, find_damage, read_index
from pangu.checkpoint.status import continuation_order
from pangu.collectives.agreement import agree
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import ConfigError, UserError, reading
from pangu.common.files import open_regular
from pangu.config.build import build
from pangu.config.data import DataConfig
from pangu.config.model import ModelConfig
from pangu.config.optimizer import PrecisionConfig
from pangu.models.parameters import is_of_mtp, logical_shapes
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

_UNREADABLE = "the configuration of the run cannot be read"
MOST_BYTES = 4 * 2**20
"""Largest config.yaml, bytes; a larger one would keep the parser busy for minutes."""


@dataclass(frozen=True)
class Trained:
    """Groups of `RunConfig` that describe a trained model."""

    model: ModelConfig
    data: DataConfig
    precision: PrecisionConfig


def require_fit(path: Path, index: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], every: str = "") -> None:
    """Raise a UserError naming tensors of `shapes` that are missing or misshapen, and extra ones of kind `every`."""
    problems = [f"{name}: not in the checkpoint" for name in shapes if name not in index["tensors"]]
    for name, entry in index["tensors"].items():
        if name in shapes and entry["shape"] != list(shapes[name]):
            problems.append(f"{name}: {entry['shape']} in the checkpoint, {list(shapes[name])} in the model")
        elif name not in shapes and every and name.startswith(f"{every}/"):
            problems.append(f"{name}: not in the model")
    if problems:
        raise UserError(f"{path}: does not fit this model:\n" + "\n".join(f"  {line}" for line in problems))


def load(path: Path, index: Mapping[str, Any], slices: Sequence[tuple[str, Slice]]) -> None:
    """Fill slices, named `KIND/NAME`, from a checkpoint of any layout; raises UserError naming all that do not fit."""
    require_fit(path, index, {name: part.shape for name, part in slices})
    for file, pieces in pieces_by_file(index, slices).items():
        with reading(path / file, SafetensorError), safe_open(path / file, framework="pt") as opened, torch.no_grad():
            for part, piece, common in pieces:
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(common, piece["offsets"], strict=True))
                target = tuple(slice(a - o, b - o) for (a, b), o in zip(common, part.offsets, strict=True))
                part.tensor[target].copy_(opened.get_slice(piece["key"])[source])


def pieces_by_file(
    index: Mapping[str, Any], slices: Iterable[tuple[str, Slice]]
) -> dict[str, list[tuple[Slice, Mapping[str, Any], list[tuple[int, int]]]]]:
    """Return the slices with stored pieces and the bounds that they share, by file, for tensors that have any."""
    by_file: dict[str, list[tuple[Slice, Mapping[str, Any], list[tuple[int, int]]]]] = {}
    for name, part in slices:
        for piece in index["tensors"].get(name, {"pieces": ()})["pieces"]:
            if common := _common(part, piece):
                by_file.setdefault(piece["file"], []).append((part, piece, common))
    return by_file


def read_tensor(path: Path, index: Mapping[str, Any], name: str) -> Tensor:
    """Return one full tensor, named `KIND/NAME`, of an undamaged checkpoint."""
    entry = index["tensors"][name]
    shape = tuple(entry["shape"])
    tensor = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
    load(path, index, [(name, Slice(tensor, shape, (0,) * len(shape)))])
    return tensor


def _common(part: Slice, piece: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """Return the global bounds per dimension of the intersection of a slice and a stored piece; None if it is empty."""
    bounds = [
        (max(o, p), min(o + size, p + length))
        for o, size, p, length in zip(part.offsets, part.tensor.shape, piece["offsets"], piece["shape"], strict=True)
    ]
    return bounds if all(a < b for a, b in bounds) else None


def damage(path: Path, mesh: Mesh) -> list[str]:
    """Return the damage of a checkpoint, on all ranks; each reads its share.

    Raises UserError on all ranks if a newer pangu has written it: it is intact, so no older one may take its place.
    """

    def look() -> list[str]:
        try:
            return find_damage(path, read_index(path), mesh.rank, mesh.layout.world)
        except NewerFormatError:
            raise
        except UserError as error:
            return [str(error)]

    return list(dict.fromkeys(line for lines in agree(mesh, look, runs_here=True) for line in lines or ()))


def intact(path: Path, mesh: Mesh) -> Path:
    """Return `path`. Raises UserError on all ranks unless it is an undamaged checkpoint."""
    if lines := damage(path, mesh):
        raise UserError("\n".join(lines))
    return path


def load_weights(
    path: Path, mesh: Mesh, weights: Iterable[tuple[str, Slice]], layers: int | None = None
) -> dict[str, Any]:
    """Fill this rank's slices with the weights of a checkpoint, and nothing else, and return its index.

    The ranks of `mesh` together hold all tensors. Raises UserError on all of them if the checkpoint is damaged, or
    naming every tensor that only one of the two has or whose shape differs. With `layers`, the number of layers of the
    model, only one of the two may have tensors of multi-token prediction.
    """
    index = read_index(intact(path, mesh))
    slices = [(f"weight/{name}", part) for name, part in weights]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in gather_objects({name: slice_.shape for name, slice_ in slices}, mesh.group("world")):
        shapes |= part
    if layers is not None:
        alone = shapes.keys() ^ {name for name in index["tensors"] if name.startswith("weight/")}
        alone = {name for name in alone if is_of_mtp(name.removeprefix("weight/"), layers)}
        if alone and mesh.is_first:
            where = "left out" if alone & index["tensors"].keys() else "missing, so they are initialized at random"
            log.warning("%s: %d tensors of multi-token prediction: %s", path, len(alone), where)
        shapes = {name: shape for name, shape in shapes.items() if name not in alone}
        slices = [(name, part) for name, part in slices if name not in alone]
        index = {**index, "tensors": {name: x for name, x in index["tensors"].items() if name not in alone}}
    require_fit(path, index, shapes, "weight")
    load(path, index, slices)
    return index


def newest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint that is not condemned if `path` is a run folder; otherwise `path`."""
    checkpoints = list_with_status(path / "checkpoints")
    return next(iter(continuation_order(checkpoints)), checkpoints[-1][0] if checkpoints else path)


def trained_model(checkpoint: Path, index: Mapping[str, Any]) -> Trained:
    """Return the trained model from config.yaml of the run folder of `checkpoint` (RUN/checkpoints/step-...).

    Other groups of keys are ignored, so that a model outlives keys that say how it was trained. The weights of `index`
    must be those of the model, which bounds the memory for it by the files' size. Raises UserError, naming the file,
    and each key that is missing or wrong, or each tensor that does not fit.
    """
    path = checkpoint.resolve().parent.parent / "config.yaml"
    values = read_yaml(path)
    with reading(path, TypeError, KeyError, rule=_UNREADABLE):
        groups = {field.name: values[field.name] for field in fields(Trained)}
    try:
        trained = build(Trained, groups)
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from error
    weights = sum(name.startswith("weight/") for name in index["tensors"])
    if trained.model.num_blocks > weights:
        raise UserError(f"{path}: model.layers = {trained.model.layers}, but {checkpoint} has only {weights} weights")
    # no heads, or a negative width
    with reading(path, ArithmeticError, RuntimeError, ValueError, rule="the `model` keys describe no valid model"):
        shapes = {f"weight/{name}": shape for name, shape in logical_shapes(trained.model).items()}
    require_fit(checkpoint, index, shapes, "weight")
    return trained


def read_yaml(path: Path) -> Any:
    """Return the values of a YAML file; raise UserError if it is unreadable, large, or refers to parts of itself."""
    # ValueError: not UTF-8, or a date that there never was; RecursionError: brackets within brackets
    with reading(path, ValueError, RecursionError, yaml.YAMLError, rule=_UNREADABLE):
        with open_regular(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return yaml.load(content.decode(), _Loader)


class _Loader(yaml.SafeLoader):
    """Loader that refuses references to parts of the file: a few lines of them may expand beyond memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported here")
        return super().compose_node(parent, index)
