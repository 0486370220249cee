"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.files import checkpoint_path, list_checkpoints, load, prune, read_index, save
from pangu.config.errors import UserError
from pangu.config.schema import RunConfig
from pangu.training.step import Trainer
from pangu.training.together import together

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
    """Write the state of a run; the first replica writes, all wait."""
    folder = Path(config.train.output) / "checkpoints"
    path = checkpoint_path(folder, trainer.step)
    facts = {
        "step": trainer.step,
        "skipped": trainer.skipped,
        "samples": samples,
        "loss_scale": {"scale": trainer.loss_scale.scale, "clean_steps": trainer.loss_scale.clean_steps},
        "identity": _identity(config),
        "layout": asdict(trainer.mesh.layout),
    }

    def write() -> None:
        save(path, _tensors(trainer), facts)
        prune(folder, config.checkpoint.keep)

    together(trainer.mesh, write, here=trainer.mesh.is_first)
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
    wanted: dict[str, Tensor] = {f"weight/{piece.placement.name}": piece.master for piece in trainer.pieces}
    for piece in trainer.pieces if updates else []:
        state = {moment: torch.zeros_like(piece.master) for moment in MOMENTS}
        wanted |= {f"{moment}/{piece.placement.name}": tensor for moment, tensor in state.items()}
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


def _tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for piece in trainer.pieces:
        yield f"weight/{piece.placement.name}", piece.master
        state = trainer.optimizer.state.get(piece.master, {})
        for moment in MOMENTS:
            if moment in state:
                yield f"{moment}/{piece.placement.name}", state[moment]


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
