"""Statuses of a run's checkpoints, written by its first rank during training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pangu.checkpoint.files import list_with_status, step_of
from pangu.checkpoint.index import read_index
from pangu.checkpoint.status import continuation_order, read_status, write_status
from pangu.collectives.agreement import agree_on_first
from pangu.common.errors import UserError
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")


class CheckpointStatuses:
    """Record of which checkpoints are proven or condemned.

    All facts for decisions are on disk, so that a run that is killed and restarted judges its checkpoints alike.
    """

    def __init__(self, folder: Path, mesh: Mesh, proven_after: int) -> None:
        """Watch the checkpoints in `folder`; `proven_after`: good steps that prove one."""
        self._folder, self._mesh, self._proven_after = folder, mesh, proven_after
        self._unproven: list[tuple[Path, int]] = []
        """Unproven checkpoints with the good steps that led to them, oldest first; on the first rank."""

    def load(self) -> None:
        """Find the checkpoints that the steps from here on may prove."""
        found: list[tuple[Path, int]] = []
        for path, status in reversed(list_with_status(self._folder) if self._mesh.is_first else []):
            if status.proven or status.condemned:
                break
            try:
                watch = read_index(path).get("watch", {})
            except UserError:
                continue  # damaged: it is named where somebody wants to continue from it
            found.append((path, watch.get("good_steps", 0)))
            if "good_steps" not in watch:
                break  # an older version wrote it, and may have kept thousands before it
        self._unproven = found[::-1]

    def add(self, path: Path, good_steps: int) -> None:
        """Add a checkpoint that is being written after `good_steps` good steps of the run."""
        if self._mesh.is_first:
            self._unproven.append((path, good_steps))

    def mark_proven(self, good_steps: int, writing: bool) -> None:
        """Mark checkpoints as proven that enough of the run's `good_steps` have followed, without a collective.

        `writing`: the newest one may not be complete.
        """
        due = [path for path, then in self._unproven if good_steps - then >= self._proven_after]
        if writing and self._unproven:
            due = [path for path in due if path != self._unproven[-1][0]]
        self._unproven = [entry for entry in self._unproven if entry[0] not in due]
        for path in due:
            try:
                if path.is_dir():  # the save may have failed, or somebody has deleted it
                    write_status(path, replace(read_status(path), proven=True))
            except UserError as error:
                log.warning("%s", error)  # the next one will be proven instead

    def add_fault(self, step: int, good_steps: int, fault: str, goes_back: bool) -> str:
        """Count a fault against the newest checkpoint and, if the run `goes_back` behind it, the proven one before it.

        That one led to the fault as well; no save is in flight. Returns their status, equal on all ranks. Raises
        UserError on all ranks if it cannot be written.
        """

        def count() -> str:
            self.mark_proven(good_steps, writing=False)
            texts: list[str] = []
            for path, status in reversed(list_with_status(self._folder)):
                if not texts or (status.proven and not status.condemned):
                    blamed = status.with_fault(f"step {step}: {fault}")
                    write_status(path, blamed)
                    texts.append(f"{path}, {step - step_of(path)} steps before, is {blamed.label}")
                    if status.proven or not goes_back:
                        break
            return "; ".join(texts) or "there is no checkpoint yet"

        return agree_on_first(self._mesh, count)

    def condemn_after(self, step: int, fault: str) -> str:
        """Condemn all checkpoints after `step`; return how to continue, equal on all ranks. May raise UserError."""

        def condemn() -> str:
            for path, status in list_with_status(self._folder):
                if step_of(path) > step:
                    write_status(path, status.with_fault(fault, condemn=True))
            order = continuation_order(list_with_status(self._folder))
            if not order:
                return "no checkpoint is old enough to continue from: set another train.output to start over"
            return f"start the same command again to continue from {order[0]}, which is older than the fault"

        return agree_on_first(self._mesh, condemn)
