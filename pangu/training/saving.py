"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    list_checkpoints,
    load,
    prune,
    read_index,
    start,
    write_slices,
)
from pangu.config.errors import UserError
from pangu.config.schema import RunConfig
from pangu.training.step import Trainer
from pangu.training.together import together
from pangu.zero.units import Piece

MOMENTS = ("exp_avg", "exp_avg_sq")


def find_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint that a run begins from; None for a fresh start.

    Raises:
        UserError: if `checkpoint.resume` forbids what the run folder holds, or names no checkpoint.
    """
    folder = Path(config.train.output) / "checkpoints"
    newest = next(reversed(list_checkpoints(folder)), None)
    if config.checkpoint.resume == "auto":
        return newest
    if config.checkpoint.resume == "none":
        if newest is not None:
            raise UserError(
                f"checkpoint.resume = none: {newest} is there already; choose another train.output, delete the folder, "
                "or let checkpoint.resume=auto continue it"
            )
        return None
    path = Path(config.checkpoint.resume)
    read_index(path)
    return path


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
    """Restore the state of a run, exactly.

    Returns:
        Samples that the run has consumed.

    Raises:
        UserError: if the checkpoint is damaged or belongs to another model, optimizer or seed.
    """
    index = read_index(path)
    _compare(path, index["identity"], _identity(config))
    updates = index["step"] - index["skipped"]
    wanted = [(f"weight/{name}", part) for name, part in _weights(trainer)]
    for state in trainer.optimizer.state.values():
        state["step"].fill_(updates)
    for moment in MOMENTS if updates else ():
        wanted += [(f"{moment}/{name}", part) for name, part in _moments(trainer, moment)]
    load(path, index, wanted)
    trainer.parameters.publish()
    trainer.step, trainer.skipped = index["step"], index["skipped"]
    trainer.loss_scale.scale = index["loss_scale"]["scale"]
    trainer.loss_scale.clean_steps = index["loss_scale"]["clean_steps"]
    return index["samples"]


def _of(pieces: Iterable[Piece], values: Callable[[Piece], Tensor]) -> Iterator[tuple[str, Slice]]:
    """Names of logical tensors with the rectangles of them that this rank has; `values` of a piece are flat."""
    for piece in pieces:
        for part, offsets in piece.rectangles(values(piece)):
            yield piece.placement.name, Slice(part, piece.placement.shape, offsets)


def _weights(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    return _of(trainer.pieces, lambda piece: piece.master)


def _moments(trainer: Trainer, kind: str) -> Iterator[tuple[str, Slice]]:
    return _of(trainer.parameters.trained_pieces, lambda piece: trainer.optimizer.state[piece.master][kind])


def _slices(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """What this rank writes. Tensors that all tensor-parallel ranks hold are written by the first, copies of a tied
    embedding by the first stage."""
    at = trainer.mesh.at
    skipped = {
        piece.placement.name
        for piece in trainer.pieces
        if (piece.placement.cut_dim is None and at.tensor != 0) or (piece.placement.shared and at.pipeline != 0)
    }
    kinds = {"weight": _weights(trainer)}
    if trainer.step > trainer.skipped:
        kinds |= {kind: _moments(trainer, kind) for kind in MOMENTS}
    for kind, parts in kinds.items():
        for name, part in parts:
            if name not in skipped:
                # frozen weights and moments may be bf16, which the files do not know
                wide = part.tensor.to(torch.promote_types(part.tensor.dtype, torch.float32))
                yield f"{kind}/{name}", replace(part, tensor=wide)


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
