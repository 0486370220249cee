"""Detection of faults of a run: loss spikes and non-finite values."""

from __future__ import annotations

import logging
import math
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects, largest
from pangu.common.errors import UserError
from pangu.config.faults import FaultsConfig
from pangu.topology.mesh import Mesh
from pangu.training.step import StepResult, Trainer
from pangu.zero.gradients import Norms

log = logging.getLogger("pangu")

NAMED_RANKS = 4
"""Largest number of ranks named in a message."""


class SpikeDetector:
    """Detector of loss spikes from earlier steps, with the history of rollbacks.

    Its state depends only on the run's own figures and is saved in checkpoints, so that a resumed run decides as an
    uninterrupted one does.
    """

    def __init__(self, config: FaultsConfig) -> None:
        """Start without history."""
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skipped = 0
        """Skipped steps in a row."""
        self.rollbacks: list[dict[str, Any]] = []
        """Faults with step, checkpoint that the run went back to, and range of samples that it skipped."""
        self.left_out = 0
        """Samples skipped on the way to this state."""
        self.good_steps = 0
        """Steps on the way to this state that were neither skipped nor faulty."""

    def fault(self, result: StepResult) -> str | None:
        """Return the fault of a step, or None. Call this once for every step."""
        self._skipped = self._skipped + 1 if result.skipped else 0
        fault = self._spike(result.loss)
        if fault is None and self._skipped > self._config.max_skipped:
            fault = f"skipped steps in a row: {self._skipped} (faults.max_skipped = {self._config.max_skipped})"
        self.good_steps += fault is None and not result.skipped
        return fault

    def _spike(self, loss: float) -> str | None:
        if self._config.spike is None:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss} (faults.spike)"
        limit, previous = self.limit, list(self._losses)
        self._losses.append(loss)
        if loss <= limit:
            return None
        return (
            f"the loss is {loss:.4f}, above {fmean(previous):.4f} + {self._config.spike:g} x {stdev(previous):.4f}, "
            f"mean and deviation of the previous {len(previous)} steps (faults.spike)"
        )

    @property
    def limit(self) -> float:
        """Largest loss of the next step that is no spike."""
        if self._config.spike is None or len(self._losses) < self._config.spike_window:
            return math.inf if self._config.spike is None else sys.float_info.max  # one that is not finite is a spike
        return fmean(self._losses) + self._config.spike * stdev(self._losses)

    def back_to(self, index: Mapping[str, Any], step: int, fault: str, end: int | None) -> dict[str, Any]:
        """Return the entries that change in the `index` of the checkpoint that a run goes back to.

        Args:
            index: Index of the checkpoint; empty for the beginning of the run.
            step: Step in which the `fault` was found.
            fault: Description of the fault.
            end: First sample, in the order of the data, that is not skipped; None: no sample is.
        """
        start, state = index.get("samples", 0), index.get("watch", {})
        end = start if end is None else end
        event = {"step": step, "fault": fault, "back_to": index.get("step", 0), "left_out": [start, end]}
        left_out = state.get("left_out", 0) + end - start
        return {"samples": end, "watch": {**state, "rollbacks": [*self.rollbacks, event], "left_out": left_out}}

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {
            "losses": list(self._losses),
            "skipped_in_a_row": self._skipped,
            "rollbacks": list(self.rollbacks),
            "left_out": self.left_out,
            "good_steps": self.good_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; an empty state is a beginning."""
        self._losses = deque(state.get("losses", ()), maxlen=self._config.spike_window)
        self._skipped = state.get("skipped_in_a_row", 0)
        self.rollbacks = list(state.get("rollbacks", ()))
        self.left_out = state.get("left_out", 0)
        self.good_steps = state.get("good_steps", 0)


class Goodput:
    """Fraction of a process's time that went into steps that count: neither skipped nor undone by a rollback."""

    def __init__(self, began: float) -> None:
        """Start at `began`, a time of `time.perf_counter()`."""
        self._began, self._first = began, -1
        self._seconds = array("d")
        """Sums of the seconds of the steps from `_first` on."""

    def after(self, step: int, seconds: float, is_skipped: bool) -> float:
        """Return the fraction after a step; one that is made again replaces itself and those that followed it."""
        if not self._seconds or step < self._first:
            self._first = step
        del self._seconds[step - self._first :]
        total = (self._seconds[-1] if self._seconds else 0.0) + (0.0 if is_skipped else seconds)
        self._seconds.append(total)
        return total / (time.perf_counter() - self._began)


def not_finite(norms: Norms) -> list[str]:
    """Return the tensors with a non-finite norm, about in the order of backward."""
    pairs = [pair for tensors, values in norms for pair in zip(reversed(tensors), reversed(values), strict=True)]
    return list(dict.fromkeys(name for (name, _), norm in pairs if not math.isfinite(norm)))


def culprits(mesh: Mesh, not_finite: Sequence[Sequence[str]]) -> str:
    """Return a text that names the ranks with non-finite gradients, given each rank's tensors before reduction."""
    ranks = _first_ranks(mesh, not_finite)
    if not ranks:
        return "the gradients of each rank are finite, but their sum or its norm is not"
    if all(set(names) <= {"loss"} for names in not_finite):
        return f"the loss is not finite, though all gradients are: {ranks}"
    return f"gradients are not finite: {ranks}"


def _first_ranks(mesh: Mesh, tensors: Sequence[Sequence[str]]) -> str:
    """Return a text with the first ranks that have `tensors` (names per rank), and the first tensor of each."""
    ranks = [
        f"{mesh.named([rank])}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in enumerate(tensors)
        if names
    ]
    rest = len(ranks) - NAMED_RANKS
    return "; ".join(ranks[:NAMED_RANKS] + ([f"{rest} more ranks"] if rest > 0 else []))


def find_non_finite(trainer: Trainer) -> str | None:
    """Return a text with the ranks that hold non-finite fp32 weights or moments, equal on all ranks; None: none do.

    No correct step makes such a value: one whose gradient overflows is skipped, and changes neither weights nor
    moments. Each rank reads its states once, where they are stored.
    """
    mesh = trainer.mesh
    world = mesh.group("world")
    names = _non_finite_names((name, part.tensor) for name, part in trainer.state())
    most = largest(torch.tensor(len(names), dtype=torch.int32, device=mesh.device), world)
    return _first_ranks(mesh, gather_objects(names, world)) if int(most) else None


def _non_finite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors with a non-finite value.

    Non-finite values spread to the norm, which one fused kernel computes for many tensors. Large finite values can make
    a norm overflow, too, so the suspects are checked one by one.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    names = []
    for group in groups.values():
        finite = torch.stack(torch._foreach_norm([tensor for _, tensor in group])).isfinite().tolist()
        suspects = [entry for entry, norm_is_finite in zip(group, finite, strict=True) if not norm_is_finite]
        names += [name for name, tensor in suspects if not bool(tensor.isfinite().all())]
    return list(dict.fromkeys(names))


@contextmanager
def log_on_failure(message: str) -> Iterator[None]:
    """Log the reason of the block if it fails, so that its own error does not hide that."""
    try:
        yield
    except UserError:
        log.error(message)
        raise
