"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.files import (
    Slice,
    checkpoint_path,
    commit,
    discard,
    find_damage,
    list_checkpoints,
    load,
    prune,
    read_index,
    start,
    tidy,
    write_slices,
)
from pangu.collectives.reduce import gather_objects
from pangu.config.errors import UserError
from pangu.config.schema import RunConfig
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.training.together import together
from pangu.zero.units import Piece

log = logging.getLogger("pangu")

MOMENTS = ("exp_avg", "exp_avg_sq")


def find_checkpoint(config: RunConfig, mesh: Mesh) -> Path | None:
    """The checkpoint that a run begins from, intact; None for a fresh start. All ranks read the files between them.

    Raises:
        UserError: on all ranks, if `checkpoint.resume` forbids what the run folder holds, or names no intact
            checkpoint, or if the run folder holds none but damaged ones.
    """
    resume = config.checkpoint.resume
    folder = Path(config.train.output) / "checkpoints"
    (found, *_) = together(mesh, lambda: list_checkpoints(folder), here=mesh.is_first)
    assert found is not None
    if resume == "none" and found:
        raise UserError(
            f"checkpoint.resume = none: {found[-1]} is there already; choose another train.output, delete the folder, "
            "or let checkpoint.resume=auto continue it"
        )
    if resume not in ("auto", "none"):
        if damage := _damage(Path(resume), mesh):
            raise UserError("\n".join(damage))
        return Path(resume)
    problems = []
    for path in reversed(found):
        damage = _damage(path, mesh)
        if not damage:
            return path
        problems += damage
        for line in damage:
            log.warning("skipping a checkpoint: %s", line)
    if problems:
        raise UserError(
            f"{folder}: no checkpoint here is intact; choose another train.output to start from the beginning:\n"
            + "\n".join(f"  {line}" for line in problems)
        )
    return None


def _damage(path: Path, mesh: Mesh) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks."""
    try:
        mine = find_damage(path, read_index(path), mesh.rank, mesh.layout.world)
    except UserError as error:
        mine = [str(error)]
    found = [line for lines in gather_objects(mine, mesh.group("world")) for line in lines]
    return list(dict.fromkeys(found))


def save_checkpoint(config: RunConfig, trainer: Trainer, samples: int) -> Path:
    """Write the state of a run; each element is written once, by one of the ranks that hold it, and all wait."""
    folder = Path(config.train.output) / "checkpoints"
    path = checkpoint_path(folder, trainer.step)
    mesh = trainer.mesh
    facts = {
        "step": trainer.step,
        "skipped": trainer.skipped,
        "samples": samples,
        "loss_scale": {"scale": trainer.loss_scale.scale, "clean_steps": trainer.loss_scale.clean_steps},
        "identity": _identity(config),
        "layout": asdict(mesh.layout),
    }
    try:
        together(mesh, lambda: start(path), here=mesh.is_first)
        write = partial(write_slices, path, mesh.rank, _slices(trainer))
        # the other replicas hold copies
        writes = mesh.at.data < mesh.layout.shards
        parts = [part for part in together(mesh, write, here=writes) if part is not None]
        together(mesh, lambda: commit(path, parts, facts), here=mesh.is_first)
    except UserError:
        if mesh.is_first:
            discard(path)
        raise
    together(mesh, lambda: prune(folder, config.checkpoint.keep), here=mesh.is_first)
    return path


def load_checkpoint(path: Path, config: RunConfig, trainer: Trainer) -> int:
    """Restore the state of a run, exactly, from an intact checkpoint, which becomes the newest of the run folder.

    Returns:
        Samples that the run has consumed.

    Raises:
        UserError: if the checkpoint belongs to another model, optimizer or seed.
    """
    index = read_index(path)
    _compare(path, index["identity"], _identity(config))
    updates = index["step"] - index["skipped"]
    wanted = [(f"weight/{name}", part) for name, part in _of(trainer, lambda piece: piece.master)]
    for piece in trainer.pieces if updates else []:
        # torch's fused Adam wants its step count beside the weights; LAMB reads it on the host
        where = piece.master.device if config.optimizer.name == "adam" else "cpu"
        state = {moment: torch.zeros_like(piece.master) for moment in MOMENTS}
        trainer.optimizer.state[piece.master] = {"step": torch.tensor(float(updates), device=where), **state}
    for moment in MOMENTS if updates else ():
        wanted += [(f"{moment}/{name}", part) for name, part in _of(trainer, _moment(trainer, moment))]
    together(trainer.mesh, lambda: load(path, index, wanted), here=True)
    trainer.parameters.weights.publish()
    trainer.step, trainer.skipped = index["step"], index["skipped"]
    trainer.loss_scale.scale = index["loss_scale"]["scale"]
    trainer.loss_scale.clean_steps = index["loss_scale"]["clean_steps"]
    folder = Path(config.train.output) / "checkpoints"
    (aside, *_) = together(trainer.mesh, lambda: tidy(folder, trainer.step), here=trainer.mesh.is_first)
    for later in aside or ():
        log.warning("%s: this run continues from an earlier step; delete it if you do not need it", later)
    return index["samples"]


def _of(trainer: Trainer, values: Callable[[Piece], Tensor]) -> Iterator[tuple[str, Slice]]:
    """Names of logical tensors with the rectangles of them that this rank has; `values` of a piece are flat."""
    for piece in trainer.pieces:
        for part, offsets in piece.rectangles(values(piece)):
            yield piece.placement.name, Slice(part, piece.placement.shape, offsets)


def _moment(trainer: Trainer, kind: str) -> Callable[[Piece], Tensor]:
    return lambda piece: trainer.optimizer.state[piece.master][kind]


def _slices(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """What this rank writes. Tensors that all tensor-parallel ranks hold are written by the first, copies of a tied
    embedding by the first stage."""
    at = trainer.mesh.at
    skipped = {
        piece.placement.name
        for piece in trainer.pieces
        if (piece.placement.cut_dim is None and at.tensor != 0) or (piece.placement.shared and at.pipeline != 0)
    }
    kinds: dict[str, Callable[[Piece], Tensor]] = {"weight": lambda piece: piece.master}
    if trainer.optimizer.state:
        kinds |= {kind: _moment(trainer, kind) for kind in MOMENTS}
    for kind, values in kinds.items():
        yield from ((f"{kind}/{name}", part) for name, part in _of(trainer, values) if name not in skipped)


def _identity(config: RunConfig) -> dict[str, Any]:
    """What must not change between the parts of one run. The attention kernel may: it computes the same function."""
    model = asdict(replace(config.model, attention="auto", ffn=config.model.ffn_size))
    del model["attention"]
    identity = {f"model.{key}": value for key, value in model.items()}
    return identity | {"optimizer.name": config.optimizer.name, "train.seed": config.train.seed}


def _compare(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    wrong = [
        f"  {key} = {current.get(key)}: the checkpoint has {value}"
        for key, value in saved.items()
        if current.get(key) != value
    ]
    if wrong:
        advice = "give the same values to continue it, or another train.output to start a new run"
        raise UserError(f"{path}: belongs to a different run; {advice}:\n" + "\n".join(wrong))
