"""What of a run goes into a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from pangu.checkpoint.files import Slice, amend, checkpoint_path, list_checkpoints, prune, rectangles_of
from pangu.checkpoint.run_folder import identity
from pangu.collectives.agreement import StuckError, agree, complete
from pangu.config.errors import SAVE_SECONDS, LocalError, UserError, writing
from pangu.config.files import flush
from pangu.config.schema import RunConfig
from pangu.data.order import ORDER_VERSION
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.zero.norms import counts

log = logging.getLogger("pangu")

MOMENTS = ("exp_avg", "exp_avg_sq")


def find_checkpoint(config: RunConfig, mesh: Mesh) -> Path | None:
    """The checkpoint that a run begins from, intact; None for a fresh start. All ranks read the files between them.
    Raises UserError on all ranks, if `checkpoint.resume` forbids what the run folder holds, or names no intact
    checkpoint, or if the run folder holds none but damaged ones."""
    resume = config.checkpoint.resume
    folder = Path(config.train.output) / "checkpoints"
    (paths, *_) = agree(mesh, lambda: list_checkpoints(folder), runs_here=mesh.is_first)
    assert paths is not None
    if resume == "none" and paths:
        raise UserError(
            f"checkpoint.resume = none: {paths[-1]} is there already; choose another train.output, delete the folder, "
            "or let checkpoint.resume=auto continue it"
        )
    if resume in ("auto", "none") and not paths:
        return None
    from pangu.training.resuming import intact_checkpoint

    return intact_checkpoint(config, paths, mesh)


class Saver:
    """Writes checkpoints while training goes on, each element once, by one of the ranks that hold it.

    A context manager: at its end it waits for the writer, but not for ever.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._folder = Path(config.train.output) / "checkpoints"
        self._mesh = trainer.mesh.background()
        self._arena = None
        if config.checkpoint.every and config.checkpoint.asynchronous:
            from pangu.checkpoint.arena import Arena

            self._arena = Arena(self._mesh.device, _slices(trainer, every_kind=True))
        self._save: Future[Path] | None = None
        """The last save, until it is known how it ended."""
        self.newest: Path | None = None
        """The last checkpoint that this process saved or went back to."""

    def save(self, samples: int, watch: Mapping[str, Any], position: Mapping[str, Any] | None = None) -> None:
        """Copy the state of the run and begin to write it, once the save before has settled.

        `samples`: place in the order of the data from which the run continues; `watch`: of `faults.SpikeDetector`;
        `position`: of the data (`Stream.position`), there or before.
        """
        self.settle()
        trainer = self._trainer
        facts = {
            "step": trainer.step,
            "skipped": trainer.skipped,
            "samples": samples,
            "order": ORDER_VERSION,
            "position": position,
            "watch": dict(watch),
            "loss_scale": trainer.loss_scale.state(),
            "fp8": None if trainer.scales is None else trainer.scales.state(),
            "experts": None if trainer.balance is None else trainer.balance.state(),
            "frozen": list(self._config.train.frozen),
            "identity": identity(self._config),
            "layout": asdict(trainer.mesh.layout),
            "choices": trainer.choices,
        }
        path = checkpoint_path(self._folder, trainer.step)
        slices = _slices(trainer)
        self._save = Future()
        if self._arena is not None:
            copies, trainer.copied = self._arena.copy(slices)
            arguments = (self._save, partial(self._write, path, copies, facts))
            Thread(target=complete, args=arguments, name="checkpoint", daemon=True).start()
        else:
            complete(self._save, partial(self._write, path, slices, facts))

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the last save has failed, and nobody has heard of it."""
        return self._save is not None and self._save.done() and self._save.exception() is not None

    def finish(self) -> None:
        """Wait until the last save has ended. Raises UserError on all ranks if it failed."""
        save, self._save = self._save, None
        if save is not None:
            self.newest = save.result()

    def settle(self) -> None:
        """Wait until the last save has ended; a failure of it is a warning, because older checkpoints are untouched.
        Raises StuckError if it makes no progress: the next one would not either."""
        try:
            self.finish()
        except StuckError:
            raise
        except UserError as error:
            log.warning("%s", error)

    def go_back(self, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the run to its newest intact checkpoint, as `load_checkpoint` does. `change` gives the facts of its
        index that are others now; they are written first, so that a run that is resumed from it does the same.

        Raises UserError on all ranks if there is no intact checkpoint.
        """
        from pangu.checkpoint.index import read_index
        from pangu.training.resuming import load_checkpoint, newest_intact

        self.settle()
        mesh = self._trainer.mesh
        (paths, *_) = agree(mesh, lambda: list_checkpoints(self._folder), runs_here=mesh.is_first)
        path, _ = newest_intact(paths or [], mesh)
        if path is None:
            raise UserError(f"{self._folder}: there is no intact checkpoint yet to go back to")
        index = read_index(path)
        agree(mesh, lambda: amend(path, {**index, **change(index)}), runs_here=mesh.is_first)
        self.newest = path
        return load_checkpoint(path, self._config, self._trainer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._save is not None and not isinstance(error, LocalError):
            wait([self._save], SAVE_SECONDS)

    def _write(self, path: Path, slices: Iterable[tuple[str, Slice]], facts: dict[str, Any]) -> Path:
        """Write a checkpoint together with the other ranks, and delete those that are too old."""
        from pangu.checkpoint.together import write_together
        from pangu.collectives.long_work import agree_on_long_work

        mesh, keep = self._mesh, self._config.checkpoint

        def flush_figures() -> None:
            # a run that continues from the checkpoint counts on the figures of the steps before it
            figures = self._folder.parent / "metrics.jsonl"
            if figures.exists():  # who saves without a run has none
                with writing(figures):
                    flush(figures)

        write_together(mesh, path, slices, facts, flush_figures)
        doing = f"deleting what is older than {path}"
        try:
            agree_on_long_work(
                mesh, doing, lambda _: prune(self._folder, keep.keep, keep.keep_every), runs_here=mesh.is_first
            )
        except StuckError:
            raise
        except UserError as error:
            log.warning("%s", error)  # what was saved is whole
        return path


def weights_of(trainer: Trainer) -> Iterator[tuple[str, Slice]]:
    """Names of logical tensors with the rectangles of their fp32 weights that this rank updates."""
    for shard in trainer.shards:
        yield from rectangles_of(shard, shard.main)


def state_of(trainer: Trainer, every_kind: bool = False) -> Iterator[tuple[str, Slice]]:
    """The rectangles of this rank, as `KIND/NAME`: weights and, once a step is made, the optimizer's moments."""
    yield from ((f"weight/{name}", part) for name, part in weights_of(trainer))
    for kind in MOMENTS if every_kind or trainer.step > trainer.skipped else ():
        for shard in trainer.parameters.trained_shards:
            moments = rectangles_of(shard, trainer.optimizer.state[shard.main][kind])
            yield from ((f"{kind}/{name}", part) for name, part in moments)


def _slices(trainer: Trainer, every_kind: bool = False) -> Iterator[tuple[str, Slice]]:
    """What this rank writes: of what several hold, the first."""
    at, layout = trainer.mesh.at, trainer.mesh.layout
    skipped = {shard.placement.name for shard in trainer.shards if not counts(shard.placement, layout, at)}
    yield from (named for named in state_of(trainer, every_kind) if named[0].partition("/")[2] not in skipped)
