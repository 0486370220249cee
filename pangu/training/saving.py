"""Saving of a run's state in checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from pangu.checkpoint.files import Slice, amend, checkpoint_path, partial_of, prune, step_of, tidy
from pangu.checkpoint.index import read_index, read_start, write_start
from pangu.checkpoint.reading import damage, intact
from pangu.checkpoint.remote import RemoteRun
from pangu.checkpoint.run_folder import flush_figures, identity
from pangu.checkpoint.staging import StagingMemory
from pangu.checkpoint.status import CheckpointStatus, write_status
from pangu.checkpoint.writing import write_together
from pangu.collectives.agreement import StuckError, agree_on_first, agree_on_long_work, complete, in_thread
from pangu.common.errors import SAVE_SECONDS, LocalError, UserError
from pangu.config.schema import RunConfig
from pangu.data.order import ORDER_VERSION
from pangu.topology.mesh import Mesh
from pangu.training.checkpoint_statuses import CheckpointStatuses
from pangu.training.memory_checkpoints import MemoryCheckpoints, forget
from pangu.training.resuming import begin_with, in_sequences_of, load_checkpoint, place_to_continue
from pangu.training.step import Trainer
from pangu.training.uploading import Uploader, all_checkpoints
from pangu.training.verifying import Verifier

log = logging.getLogger("pangu")

WRITER = "checkpoint"
"""Name of the thread that writes checkpoints."""


def find_checkpoint(config: RunConfig, mesh: Mesh, in_memory: MemoryCheckpoints | None = None) -> Path | None:
    """Return the intact checkpoint that a run continues from; None: start from the seed. All ranks share reading.

    A generation in memory, which may lack files on this node, is preferred to what a disk has of its step or before.

    Raises UserError on all ranks if `checkpoint.resume` forbids the content of the run folder or names no intact
    checkpoint, if the run folder holds none that can be continued, or `checkpoint.init_from` is none.
    """
    resume = config.checkpoint.resume
    found, uploaded = agree_on_first(mesh, lambda: all_checkpoints(config, is_running=False))
    if resume == "none" and found:
        newest = found[-1][0]
        where = f"{config.checkpoint.remote}/checkpoints/{uploaded[newest]}" if newest in uploaded else newest
        raise UserError(
            f"checkpoint.resume = none: {where} already exists; set another train.output, delete the folder, "
            "or set checkpoint.resume=auto to continue it"
        )

    def has_newer(step: int) -> bool:
        return any(step_of(path) > step and (path in uploaded or not damage(path, mesh)) for path, _ in found)

    # before copies in memory are deleted: the path may be mistyped
    given = None if resume in ("auto", "none") else intact(Path(resume), mesh)
    if in_memory is not None and resume == "auto":
        if (generation := in_memory.find(has_newer)) is not None:
            return generation
    elif in_memory is not None:
        in_memory.clear()
    elif mesh.is_first:
        forget(Path(config.train.output))
    if found and given is None:
        return place_to_continue(config, mesh)
    if (first := config.checkpoint.init_from) is not None:
        agree_on_first(mesh, lambda: bool(read_index(Path(first))))
    return given


def begin(config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    """Start a run with a new trainer, and with the weights of `checkpoint.init_from`, if given.

    Returns the `samples` and `watch` of a checkpoint's index if the run went back to its beginning before, otherwise
    {}. Existing checkpoints, all condemned, are renamed.
    """
    folder, mesh = Path(config.train.output) / "checkpoints", trainer.mesh

    def clear() -> tuple[list[Path], dict[str, Any]]:
        if config.checkpoint.remote is not None:
            RemoteRun(config.checkpoint.remote).fetch_start(folder)
        if not folder.exists():
            return [], {}
        return tidy(folder, -1), read_start(folder)

    abandoned, facts = agree_on_first(mesh, clear)
    for checkpoint in abandoned:
        log.warning("%s: this run starts over without it; delete it if you do not need it", checkpoint)
    if config.checkpoint.init_from is not None:
        begin_with(Path(config.checkpoint.init_from), config, trainer)
        log.info("starting from the weights of %s", config.checkpoint.init_from)
    return facts


def facts_of(
    config: RunConfig, trainer: Trainer, samples: int, watch: Mapping[str, Any], position: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the facts of a run for the index of a checkpoint; see `Saver.save`."""
    return {
        "step": trainer.step,
        "skipped": trainer.skipped,
        "samples": samples,
        "order": ORDER_VERSION,
        "position": position,
        "watch": dict(watch),
        "loss_scale": trainer.loss_scale.state(),
        "fp8": None if trainer.scales is None else trainer.scales.state(),
        "experts": None if trainer.balance is None else trainer.balance.state(),
        "frozen": list(config.train.frozen),
        "moments_since": trainer.moments_since,
        "identity": identity(config),
        "layout": asdict(trainer.mesh.layout),
        "choices": trainer.choices,
    }


class Saver(AbstractContextManager["Saver"]):
    """Writer of checkpoints during training; each element is written once, by one of the ranks that hold it.

    Use it as a context manager; its end waits for the writer, but not forever.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, in_memory: MemoryCheckpoints | None = None) -> None:
        """Allocate memory for asynchronous saves, and read the statuses."""
        self._config = config
        self._trainer = trainer
        self._in_memory = in_memory
        self._folder = Path(config.train.output) / "checkpoints"
        self._mesh = trainer.mesh.background()
        self._staging = None
        if config.checkpoint.every and config.checkpoint.asynchronous:
            self._staging = StagingMemory(self._mesh.device, trainer.state(every_kind=True, owned=True))
        self._save: Future[Path] | None = None
        """Last save, until its result is known."""
        self.newest: Path | None = None
        """Last checkpoint that this process saved or went back to."""
        self._most_failed = config.checkpoint.max_failed_saves
        self.failed = 0
        """Failed saves in a row, equal on all ranks."""
        self.statuses = CheckpointStatuses(self._folder, trainer.mesh, config.faults.proven_after)
        self.statuses.load()
        self.uploader = None
        """Thread that copies checkpoints to `checkpoint.remote`, if it is set."""
        if config.checkpoint.remote is not None:
            self.uploader = Uploader(config.checkpoint, self._folder, self._mesh)
            self.uploader.continue_from(trainer.step)
        self._verifier = None
        if config.checkpoint.verify_every_hours is not None and trainer.mesh.is_first:
            self._verifier = Verifier(self._folder, config.checkpoint.verify_every_hours)

    def save(
        self,
        samples: int,
        watch: Mapping[str, Any],
        position: Mapping[str, Any] | None = None,
        validation_loss: float | None = None,
    ) -> None:
        """Copy the state of the run and start to write it, once the previous save has been written.

        `samples`: position in the order of the data from which the run continues; `watch`: state of
        `faults.SpikeDetector`; `position`: of the data (`Stream.position`), there or before; `validation_loss`: of the
        step, if it was validated.
        """
        self.wait()
        trainer = self._trainer
        facts = facts_of(self._config, trainer, samples, watch, position)
        path = checkpoint_path(self._folder, trainer.step)
        # first: what is pruned after this save depends on it, however long the save before took
        self.statuses.mark_proven(watch.get("good_steps", 0), writing=False)
        self.statuses.add(path, watch.get("good_steps", 0))
        slices = trainer.state(owned=True)
        write = partial(self._write, path, facts=facts, validation_loss=validation_loss)
        if self._staging is not None:
            copies, trainer.copied = self._staging.copy(slices)
            self._save = in_thread(WRITER, partial(write, copies))
        else:
            self._save = Future()
            complete(self._save, partial(write, slices))

    def finish_copy(self) -> None:
        """Wait for the generation of the last step before the update: no crash repeats steps from before it."""
        if self._in_memory is not None:
            self._in_memory.wait()

    def save_in_memory(self, samples: int, watch: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        """Start to write a generation in memory if it is due; the last step's would be deleted at once."""
        config, step, every = self._config, self._trainer.step, self._config.checkpoint.memory_every
        if self._in_memory is not None and every and step % every == 0 and step < config.train.steps:
            self._in_memory.save(self._trainer, facts_of(config, self._trainer, samples, watch, position))

    @property
    def has_failed(self) -> bool:
        """True if this rank knows that the last save has failed, and has not reported it."""
        return self._save is not None and self._save.done() and self._save.exception() is not None

    def finish(self) -> None:
        """Wait until the last save has ended. Raises UserError on all ranks if it failed."""
        save, self._save = self._save, None
        if save is not None:
            self.newest = save.result()
            self.failed = 0

    @property
    def failures(self) -> dict[str, int]:
        """Failures in a row of saves, copies in memory and uploads, and damaged checkpoints, where these are made."""
        uploads = {} if self.uploader is None else {"failed_uploads": self.uploader.failed}
        damaged = {} if self._verifier is None else {"damaged_checkpoints": len(self._verifier.damaged)}
        copies = {} if self._in_memory is None else {"failed_copies": self._in_memory.failed}
        return {"failed_saves": self.failed} | copies | uploads | damaged

    @property
    def copies(self) -> dict[str, float]:
        """Sizes of copies in memory, once there are any."""
        return {} if self._in_memory is None else self._in_memory.sizes

    def finish_uploads(self) -> None:
        """Wait until all is sent, or makes no progress; each rank for its share. May raise StuckError on all ranks."""
        if (uploader := self.uploader) is not None:
            mesh, doing = self._mesh, f"sending checkpoints to {self._config.checkpoint.remote}"
            # the first rank last: it would give up what others are still sending
            for runs_here in (not mesh.is_first, mesh.is_first):
                agree_on_long_work(
                    mesh, doing, lambda report: uploader.wait(mesh.timeout_s / 2, report), runs_here=runs_here
                )

    def wait(self, is_fault: bool = False) -> None:
        """Wait until the last save has ended. A failure is a warning, because older checkpoints are untouched.

        `is_fault`: the state of the run is in doubt, so delete its copies in memory.

        Raises:
            StuckError: The save makes no progress, so the next one would not either.
            UserError: On all ranks, more saves in a row have failed than `checkpoint.max_failed_saves`.
        """
        try:
            self.finish()
        except StuckError:
            raise
        except UserError as error:
            self.failed += 1
            if self.failed > self._most_failed:
                rule = f"checkpoint.max_failed_saves = {self._most_failed}"
                raise UserError(f"failed saves in a row: {self.failed} ({rule}); the last one: {error}") from error
            log.warning("%s", error, extra={"alert": "failed_save"})
        if is_fault and self._in_memory is not None:
            self._in_memory.wait()
            self._in_memory.clear()

    @property
    def is_writing(self) -> bool:
        """True if the last save has not ended yet on this rank."""
        return self._save is not None and not self._save.done()

    def go_back(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the run to the checkpoint of `resuming.place_to_continue`, or to its beginning, and the facts there.

        `change` returns the facts that differ now; they are written first, so that a run that is resumed from there
        does the same. The last save must have settled. Raises UserError on all ranks if there are checkpoints and none
        can be continued.
        """
        mesh = self._trainer.mesh
        self.newest = path = place_to_continue(self._config, mesh, is_running=True)
        resume = self._config.checkpoint.resume
        if path is None and resume not in ("auto", "none"):
            raise UserError(
                f"{self._folder}: has no checkpoint to go back to; start the same command to begin again from "
                f"checkpoint.resume = {resume}, or set checkpoint.resume=auto to start from the seed"
            )
        if path is None:
            agree_on_first(mesh, lambda: write_start(self._folder, change(read_start(self._folder))))
            self._trainer.start_over()
            index = begin(self._config, self._trainer)
        else:
            index = in_sequences_of(path, read_index(path), self._config)
            agree_on_first(mesh, lambda: amend(path, {**index, **change(index)}))
            index = load_checkpoint(path, self._config, self._trainer)
        self.statuses.load()
        if self.uploader is not None:
            self.uploader.continue_from(self._trainer.step)
            self.uploader.wait(min(SAVE_SECONDS, self._mesh.timeout_s / 2))  # others wait for this rank meanwhile
        return index

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Wait for the last save, unless this process must end at once."""
        if self._verifier is not None:
            self._verifier.end()
        if self._save is not None and not isinstance(error, LocalError):
            wait([self._save], SAVE_SECONDS)
        if self.uploader is not None and error is not None and not isinstance(error, LocalError):
            self.uploader.wait(SAVE_SECONDS)  # that a checkpoint is condemned must be known there
        if self.uploader is not None:
            self.uploader.end()  # this process may begin again, as another rank

    def _write(
        self, path: Path, slices: Iterable[tuple[str, Slice]], facts: dict[str, Any], validation_loss: float | None
    ) -> Path:
        """Write a checkpoint together with the other ranks, and delete those that are too old."""
        mesh = self._mesh

        def finish() -> None:
            write_status(partial_of(path), CheckpointStatus(saved_s=time.time(), validation_loss=validation_loss))
            flush_figures(self._folder.parent)

        write_together(mesh, path, slices, facts, finish)
        doing, config = f"deleting checkpoints older than {path}", self._config.checkpoint
        agree_on_long_work(mesh, doing, lambda _: prune(self._folder, config), runs_here=mesh.is_first)
        if self.uploader is not None:
            self.uploader.wake()
        return path
