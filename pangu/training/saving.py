"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Write the state of a run; each element is written once, by a rank of the first replica, and all wait."""
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
        parts = [part for part in together(mesh, write, here=mesh.at.data == 0) if part is not None]
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
    wanted = {f"weight/{piece.placement.name}": _slice(piece, piece.master) for piece in trainer.pieces}
    for piece in trainer.pieces if updates else []:
        state = {moment: torch.zeros_like(piece.master) for moment in MOMENTS}
        wanted |= {f"{moment}/{piece.placement.name}": _slice(piece, tensor) for moment, tensor in state.items()}
        # torch's fused Adam wants its step count beside the weights; LAMB reads it on the host
        where = piece.master.device if config.optimizer.name == "adam" else "cpu"
        trainer.optimizer.state[piece.master] = {"step": torch.tensor(float(updates), device=where), **state}
    load(path, index, wanted)
    for unit in trainer.units:
        unit.publish()
    trainer.step, trainer.skipped = index["step"], index["skipped"]
    trainer.loss_scale.scale = index["loss_scale"]["scale"]
    trainer.loss_scale.clean_steps = index["loss_scale"]["clean_steps"]
    return index["samples"]


def _slice(piece: Piece, tensor: Tensor) -> Slice:
    return Slice(tensor, piece.placement.shape, piece.placement.offsets)


def _slices(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """What this rank writes; tensors that all tensor-parallel ranks hold are written by the first."""
    for piece in trainer.pieces:
        if piece.placement.cut_dim is None and trainer.mesh.at.tensor != 0:
            continue
        yield f"weight/{piece.placement.name}", _slice(piece, piece.master)
        state = trainer.optimizer.state.get(piece.master, {})
        for moment in MOMENTS:
            if moment in state:
                yield f"{moment}/{piece.placement.name}", _slice(piece, state[moment])


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
