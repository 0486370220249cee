"""Status of a checkpoint: proven by good steps that followed it, or condemned by faults; and when it was saved.

A finite but wrong update can be saved before its effect shows. `standing.json` next to `index.json` records what
happened after the checkpoint was written, so that a run never returns twice to a state that leads to a fault. One
process writes it, atomically; a checkpoint without it is neither proven nor condemned.

    saved --- `faults.proven_after` good steps ---> proven --- second fault ---> condemned
      --- a fault before that -------------------------------------------> condemned
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError, reading
from pangu.common.files import flush, parse_json, read_json, write_atomically

FILE = "standing.json"
MOST_FAULTS = 2
"""Faults that condemn a proven checkpoint."""


@dataclass(frozen=True)
class CheckpointStatus:
    """Facts that a run has learned about a checkpoint since it was written."""

    proven: bool = False
    """True if enough good steps have followed it."""
    condemned: bool = False
    """True if no run should continue from it."""
    faults: tuple[str, ...] = ()
    """Faults of steps that followed it before the next proven one, newest last."""
    saved_s: float | None = None
    """Time of saving in seconds since 1970 (UTC); None: a version that did not record it has saved it."""
    validation_loss: float | None = None
    """Validation loss of its step; None: not measured."""

    def with_fault(self, fault: str, condemn: bool = False) -> CheckpointStatus:
        """Return the status after one more fault."""
        faults = (*self.faults, fault)
        return replace(self, faults=faults, condemned=condemn or not self.proven or len(faults) >= MOST_FAULTS)

    @property
    def label(self) -> str:
        """Name of the status: `proven`, `not proven yet` or `condemned`."""
        return "condemned" if self.condemned else "proven" if self.proven else "not proven yet"

    def __str__(self) -> str:
        """Return the status with its faults, e.g. `condemned (step 7: the loss is nan)`."""
        return self.label + (f" ({'; '.join(self.faults)})" if self.faults else "")


def read_status(path: Path) -> CheckpointStatus:
    """Return the status of the checkpoint `path`; an unreadable file counts as absent."""
    file = path / FILE
    try:
        return _status(read_json(file, shared=True) if file.exists() or file.is_symlink() else {})
    except UserError:
        return CheckpointStatus()


def parse_status(text: str | bytes) -> CheckpointStatus:
    """Return the status that a text holds, as `read_status` does."""
    try:
        return _status(parse_json(text))
    except ValueError:
        return CheckpointStatus()


def _status(value: Any) -> CheckpointStatus:
    faults = value.get("faults", []) if isinstance(value, dict) else None
    if not isinstance(faults, list) or not all(isinstance(fault, str) for fault in faults):
        return CheckpointStatus()
    figures = (value.get(name) for name in ("saved_s", "validation_loss"))
    known = (float(one) if type(one) in (int, float) and math.isfinite(one) else None for one in figures)
    return CheckpointStatus(value.get("proven") is True, value.get("condemned") is True, tuple(faults), *known)


def write_status(path: Path, status: CheckpointStatus) -> None:
    """Atomically replace the status of the checkpoint `path`, flushed to disk. Raises UserError if that fails."""
    with reading(path / FILE, rule="the status of the checkpoint could not be written"):
        write_atomically(path / FILE, json.dumps(asdict(status)).encode())
        flush(path)


def continuation_order(checkpoints: Sequence[tuple[Path, CheckpointStatus]]) -> list[Path]:
    """Return the checkpoints to continue from, best first, given all of a run from the oldest to the newest.

    The newest one is best unless it is condemned. Then those before it that are not proven may be as bad, and come
    after all that are proven.
    """
    usable = [(path, status) for path, status in reversed(checkpoints) if not status.condemned]
    if checkpoints and checkpoints[-1][1].condemned:
        usable.sort(key=lambda entry: not entry[1].proven)  # stable: newest first among equals
    return [path for path, _ in usable]


def indispensable(checkpoints: Sequence[tuple[Path, CheckpointStatus]]) -> set[Path]:
    """Return the checkpoints that must not be pruned: the last proven one, and the next one that can become proven."""
    needed: set[Path] = set()
    for path, status in reversed(checkpoints):
        if status.condemned:
            continue
        if status.proven:
            return needed | {path}
        needed = {path}
    return needed
