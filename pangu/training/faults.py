"""Steps that went wrong: loss spikes, and gradients that are not finite step after step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from pangu.config.faults import FaultsConfig
from pangu.training.step import StepResult

NAMED_RANKS = 4


class Watch:
    """Judges every step by the ones before it, and remembers how often the run has gone back.

    All of it is a function of the run's own figures and is kept in checkpoints, so that a resumed run judges as the
    unbroken one does.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skipped = 0
        """Steps skipped in a row."""
        self.rollbacks: list[dict[str, Any]] = []
        """What happened, in which step, where the run went on from, and the range of samples that it left out."""
        self.left_out = 0
        """Samples that were left out on the way to this state."""

    def fault(self, result: StepResult) -> str | None:
        """What is wrong with a step, in words, or None. Every step is shown once."""
        self._skipped = self._skipped + 1 if result.skipped else 0
        if self._skipped > self._config.max_skipped:
            return f"{self._skipped} steps in a row are skipped (faults.max_skipped = {self._config.max_skipped})"
        if self._config.spike is None:
            return None
        if not math.isfinite(result.loss):
            return f"the loss is {result.loss}"
        before = list(self._losses)
        self._losses.append(result.loss)
        if len(before) < self._config.spike_window:
            return None
        mean, deviation = fmean(before), stdev(before)
        if result.loss <= mean + self._config.spike * deviation:
            return None
        return (
            f"the loss is {result.loss:.4f}, above {mean:.4f} + {self._config.spike:g} x {deviation:.4f}, mean and "
            f"deviation of the {len(before)} steps before (faults.spike)"
        )

    def back_to(self, index: Mapping[str, Any], step: int, fault: str, end: int) -> dict[str, Any]:
        """What changes in the checkpoint that the run goes back to.

        Args:
            index: the checkpoint's.
            step: of the fault.
            fault: in words.
            end: first sample, in the order of the data, that is not left out.
        """
        start, state = index["samples"], index.get("watch", {})
        event = {"step": step, "fault": fault, "back_to": index["step"], "left_out": [start, end]}
        left_out = state.get("left_out", 0) + end - start
        return {"samples": end, "watch": {**state, "rollbacks": [*self.rollbacks, event], "left_out": left_out}}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "losses": list(self._losses),
            "skipped_in_a_row": self._skipped,
            "rollbacks": list(self.rollbacks),
            "left_out": self.left_out,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty one is a beginning."""
        self._losses = deque(state.get("losses", ()), maxlen=self._config.spike_window)
        self._skipped = state.get("skipped_in_a_row", 0)
        self.rollbacks = list(state.get("rollbacks", ()))
        self.left_out = state.get("left_out", 0)


def culprits(not_finite: Sequence[Sequence[str]]) -> str:
    """In words, where gradients were not finite.

    Args:
        not_finite: for every rank, the names of its tensors whose gradient was not, before gradients were added up.
    """
    ranks = named_ranks(not_finite)
    if not ranks:
        return "the gradients of each rank are finite, and their sum or its norm is not"
    return f"gradients are not finite: {ranks}"


def named_ranks(tensors: Sequence[Sequence[str]]) -> str:
    """In words, the first ranks with some tensors, and the first tensor of each; `tensors`: names, for every rank."""
    ranks = [
        f"rank {rank}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in enumerate(tensors)
        if names
    ]
    rest = len(ranks) - NAMED_RANKS
    return "; ".join(ranks[:NAMED_RANKS] + ([f"{rest} more ranks"] if rest > 0 else []))
