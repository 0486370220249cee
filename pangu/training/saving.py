"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any, Self

import torch
from torch import Tensor

from pangu.checkpoint.files import (
    Slice,
    amend,
    checkpoint_path,
    commit,
    discard,
    list_checkpoints,
    load,
    prune,
    read_index,
    start,
    tidy,
    write_slices,
)
from pangu.checkpoint.identity import identity
from pangu.checkpoint.weights import damage, intact, load_weights
from pangu.config.data import DataConfig, IndexedData
from pangu.config.errors import UserError
from pangu.config.schema import RunConfig
from pangu.data.order import ORDER_VERSION
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.training.together import together
from pangu.zero.units import Piece

log = logging.getLogger("pangu")

MOMENTS = ("exp_avg", "exp_avg_sq")
PATIENCE_SECONDS = 60.0
"""How long a run that ends with an error waits for a checkpoint that is being written."""


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
        return intact(Path(resume), mesh)
    path, problems = _newest_intact(found, mesh)
    if path is None and problems:
        raise UserError(
            f"{folder}: no checkpoint here is intact; choose another train.output to start from the beginning:\n"
            + "\n".join(f"  {line}" for line in problems)
        )
    return path


def go_back(
    config: RunConfig, trainer: Trainer, change: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a run to its newest intact checkpoint, some facts of which are changed first, so that a run that is
    resumed from it later does the same.

    Args:
        config: the run.
        trainer: takes the checkpoint's state.
        change: from the checkpoint's index to the facts that are others now.

    Returns:
        As `load_checkpoint`.

    Raises:
        UserError: on all ranks, if there is no intact checkpoint.
    """
    mesh, folder = trainer.mesh, Path(config.train.output) / "checkpoints"
    (found, *_) = together(mesh, lambda: list_checkpoints(folder), here=mesh.is_first)
    path, _ = _newest_intact(found or [], mesh)
    if path is None:
        raise UserError(f"{folder}: there is no intact checkpoint yet to go back to")
    facts = change(read_index(path))
    together(mesh, lambda: amend(path, facts), here=mesh.is_first)
    return load_checkpoint(path, config, trainer)


def _newest_intact(found: Sequence[Path], mesh: Mesh) -> tuple[Path | None, list[str]]:
    """The newest intact one of some checkpoints, if there is one, and what is wrong with those after it."""
    problems: list[str] = []
    for path in reversed(found):
        lines = damage(path, mesh)
        if not lines:
            return path, problems
        problems += lines
        for line in lines:
            log.warning("skipping a checkpoint: %s", line)
    return None, problems


class Saver:
    """Writes checkpoints while training goes on, each element once, by one of the ranks that hold it.

    A context manager: at its end it waits for the writer, but not for ever.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._folder = Path(config.train.output) / "checkpoints"
        self._mesh = trainer.mesh.background()
        self._writer: Thread | None = None
        self._error: BaseException | None = None
        self.newest: Path | None = None
        """The last checkpoint that this process saved."""

    def save(self, samples: int, watch: Mapping[str, Any]) -> None:
        """Copy the state of the run and begin to write it, once the save before has settled.

        Args:
            samples: place in the order of the data from which the run continues.
            watch: state of `faults.Watch`.
        """
        self.settle()
        trainer = self._trainer
        facts = {
            "step": trainer.step,
            "skipped": trainer.skipped,
            "samples": samples,
            "order": ORDER_VERSION,
            "watch": dict(watch),
            "loss_scale": {"scale": trainer.loss_scale.scale, "clean_steps": trainer.loss_scale.clean_steps},
            "identity": identity(self._config),
            "layout": asdict(trainer.mesh.layout),
        }
        path = checkpoint_path(self._folder, trainer.step)
        # the other replicas hold copies
        writes = trainer.mesh.at.data < trainer.mesh.layout.shards
        slices = _slices(trainer) if writes else iter(())
        if not self._config.checkpoint.asynchronous:
            self._run(path, slices, facts)
            return
        copies = _copies(slices, trainer.mesh.device)
        self._writer = Thread(target=self._run, args=(path, copies, facts), name="checkpoint", daemon=True)
        self._writer.start()

    def settle(self) -> None:
        """Wait until the last save has ended; a failure of it is a warning, because older checkpoints are untouched."""
        try:
            self.finish()
        except UserError as error:
            log.warning("%s", error)

    def finish(self) -> None:
        """Wait until the last save has ended.

        Raises:
            UserError: on all ranks, if it failed.
        """
        if self._writer is not None:
            self._writer.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.join(PATIENCE_SECONDS)

    def _run(self, path: Path, slices: Iterable[tuple[str, Slice]], facts: dict[str, Any]) -> None:
        """The writer's work."""
        try:
            self._write(path, slices, facts)
            self.newest = path
        except BaseException as error:
            self._error = error

    def _write(self, path: Path, slices: Iterable[tuple[str, Slice]], facts: dict[str, Any]) -> None:
        mesh, keep = self._mesh, self._config.checkpoint
        try:
            together(mesh, lambda: start(path), here=mesh.is_first)
            parts = together(mesh, lambda: write_slices(path, mesh.rank, slices), here=True)
            written = [part for part in parts if part is not None]
            together(mesh, lambda: commit(path, written, facts), here=mesh.is_first)
        except UserError:
            if mesh.is_first:
                discard(path)
            raise
        together(mesh, lambda: prune(self._folder, keep.keep, keep.keep_every), here=mesh.is_first)


def _copies(slices: Iterable[tuple[str, Slice]], device: torch.device) -> list[tuple[str, Slice]]:
    """The slices in host memory, where the next step does not change them."""
    pinned = device.type != "cpu"  # so that the copies need not wait for one another; torch keeps and reuses the pages
    copies = []
    for name, part in slices:
        tensor = torch.empty_like(part.tensor, device="cpu", pin_memory=pinned)
        copies.append((name, replace(part, tensor=tensor.copy_(part.tensor, non_blocking=pinned))))
    if pinned:
        torch.accelerator.synchronize(device)
    return copies


def load_checkpoint(path: Path, config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    """Restore the state of a run, exactly, from an intact checkpoint, which becomes the newest of the run folder.

    Returns:
        Its index: among others `samples` and `watch`, as given to `Saver.save`.

    Raises:
        UserError: if the checkpoint belongs to another model, optimizer or seed.
    """
    index = read_index(path)
    _compare(path, index["identity"], identity(config))
    _compare_order(path, index, config.data)
    updates = index["step"] - index["skipped"]
    wanted = [(f"weight/{name}", part) for name, part in weights_of(trainer)]
    for state in trainer.optimizer.state.values():
        state["step"].fill_(updates)
        for moment in MOMENTS:
            state[moment].zero_()
    for moment in MOMENTS if updates else ():
        wanted += [(f"{moment}/{name}", part) for name, part in moments_of(trainer, moment)]
    together(trainer.mesh, lambda: load(path, index, wanted), here=True)
    trainer.parameters.publish()
    trainer.step, trainer.skipped = index["step"], index["skipped"]
    trainer.loss_scale.scale = index["loss_scale"]["scale"]
    trainer.loss_scale.clean_steps = index["loss_scale"]["clean_steps"]
    folder = Path(config.train.output) / "checkpoints"
    (aside, *_) = together(trainer.mesh, lambda: tidy(folder, trainer.step), here=trainer.mesh.is_first)
    for later in aside or ():
        log.warning("%s: this run continues from an earlier step; delete it if you do not need it", later)
    return index


def _compare_order(path: Path, index: Mapping[str, Any], data: DataConfig) -> None:
    """Say so if the place that a checkpoint has in a blend of datasets was reached in another order."""
    if index.get("order", 1) != ORDER_VERSION and isinstance(data, IndexedData) and len(data.train) > 1:
        log.warning(
            "%s: written when datasets were blended by another rule. Each goes on from its share of sample %d; the "
            "few samples by which its count differed there come again or are left out",
            path,
            index["samples"],
        )


def begin_with(path: Path, config: RunConfig, trainer: Trainer) -> None:
    """Give a new run the weights of a checkpoint. Raises UserError as `load_weights`."""
    index = load_weights(path, trainer.mesh, weights_of(trainer))
    trainer.parameters.publish()
    current = identity(config)
    for key, value in index["identity"].items():
        if key.startswith("model.") and current.get(key) != value:
            log.warning("%s = %s: the weights of %s were trained with %s", key, current.get(key), path, value)


def _of(pieces: Iterable[Piece], values: Callable[[Piece], Tensor]) -> Iterator[tuple[str, Slice]]:
    """Names of logical tensors with the rectangles of them that this rank has; `values` of a piece are flat."""
    for piece in pieces:
        for part, offsets in piece.rectangles(values(piece)):
            yield piece.placement.name, Slice(part, piece.placement.shape, offsets)


def weights_of(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """Names of logical tensors with the rectangles of their fp32 weights that this rank updates."""
    return _of(trainer.pieces, lambda piece: piece.master)


def moments_of(trainer: Trainer, kind: str) -> Iterator[tuple[str, Slice]]:
    """The same of one of the optimizer's moments, which exist once a step is made."""
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
    kinds = {"weight": weights_of(trainer)}
    if trainer.step > trainer.skipped:
        kinds |= {kind: moments_of(trainer, kind) for kind in MOMENTS}
    for kind, parts in kinds.items():
        for name, part in parts:
            if name not in skipped:
                # frozen weights and moments may be bf16: a checkpoint does not depend on how they are kept
                wide = part.tensor.to(torch.promote_types(part.tensor.dtype, torch.float32))
                yield f"{kind}/{name}", replace(part, tensor=wide)


def _compare(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    wrong = [
        f"  {key} = {current.get(key)}: the checkpoint has {value}"
        for key, value in saved.items()
        if current.get(key) != value
    ]
    if wrong:
        advice = "give the same values to continue it, or another train.output to start a new run"
        raise UserError(f"{path}: belongs to a different run; {advice}:\n" + "\n".join(wrong))
