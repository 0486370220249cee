"""What can go wrong in a run, and how it is found: loss spikes and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects, largest
from pangu.config.schema import FaultsConfig
from pangu.topology.mesh import Mesh
from pangu.training.saved_state import state_of
from pangu.training.step import StepResult, Trainer
from pangu.zero.gradients import Norms

NAMED_RANKS = 4
"""Ranks that a message names."""


class SpikeDetector:
    """Judge of every step by the ones before it, and memory of how often the run has gone back.

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
        self.good_steps = 0
        """Steps on the way to this state that were neither skipped nor a fault."""

    def fault(self, result: StepResult) -> str | None:
        """Return what is wrong with a step, or None if nothing is. Every step is shown once."""
        fault = self._judge(result)
        self.good_steps += fault is None and not result.skipped
        return fault

    def _judge(self, result: StepResult) -> str | None:
        self._skipped = self._skipped + 1 if result.skipped else 0
        if self._skipped > self._config.max_skipped:
            return f"{self._skipped} steps in a row are skipped (faults.max_skipped = {self._config.max_skipped})"
        if self._config.spike is None:
            return None
        if not math.isfinite(result.loss):
            return f"the loss is {result.loss}"
        previous = list(self._losses)
        self._losses.append(result.loss)
        if len(previous) < self._config.spike_window:
            return None
        mean, deviation = fmean(previous), stdev(previous)
        if result.loss <= mean + self._config.spike * deviation:
            return None
        return (
            f"the loss is {result.loss:.4f}, above {mean:.4f} + {self._config.spike:g} x {deviation:.4f}, mean and "
            f"deviation of the {len(previous)} steps before (faults.spike)"
        )

    def back_to(self, index: Mapping[str, Any], step: int, fault: str, end: int) -> dict[str, Any]:
        """Return what changes in the checkpoint of this `index` when a run goes back to it.

        Args:
            index: of the checkpoint; empty for the beginning of the run.
            step: in which the `fault` was found.
            fault: in words.
            end: first sample, in the order of the data, that is not left out.
        """
        start, state = index.get("samples", 0), index.get("watch", {})
        event = {"step": step, "fault": fault, "back_to": index.get("step", 0), "left_out": [start, end]}
        left_out = state.get("left_out", 0) + end - start
        return {"samples": end, "watch": {**state, "rollbacks": [*self.rollbacks, event], "left_out": left_out}}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {
            "losses": list(self._losses),
            "skipped_in_a_row": self._skipped,
            "rollbacks": list(self.rollbacks),
            "left_out": self.left_out,
            "good_steps": self.good_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; an empty one is a beginning."""
        self._losses = deque(state.get("losses", ()), maxlen=self._config.spike_window)
        self._skipped = state.get("skipped_in_a_row", 0)
        self.rollbacks = list(state.get("rollbacks", ()))
        self.left_out = state.get("left_out", 0)
        self.good_steps = state.get("good_steps", 0)


def not_finite(norms: Norms) -> list[str]:
    """Tensors with a norm that is not finite, about in backward's order."""
    pairs = [pair for tensors, of_flat in norms for pair in zip(reversed(tensors), reversed(of_flat), strict=True)]
    return list(dict.fromkeys(name for (name, _), norm in pairs if not math.isfinite(norm)))


def culprits(mesh: Mesh, not_finite: Sequence[Sequence[str]]) -> str:
    """In words, where gradients were not finite: for every rank, the names of its tensors, before the reduction."""
    ranks = _first_ranks(mesh, not_finite)
    if not ranks:
        return "the gradients of each rank are finite, and their sum or its norm is not"
    return f"gradients are not finite: {ranks}"


def _first_ranks(mesh: Mesh, tensors: Sequence[Sequence[str]]) -> str:
    """In words, the first ranks with some tensors, and the first tensor of each; `tensors`: names, for every rank."""
    ranks = [
        f"{mesh.named([rank])}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in enumerate(tensors)
        if names
    ]
    rest = len(ranks) - NAMED_RANKS
    return "; ".join(ranks[:NAMED_RANKS] + ([f"{rest} more ranks"] if rest > 0 else []))


def find_non_finite(trainer: Trainer) -> str | None:
    """Which ranks keep which fp32 weights or moments with a value that is not finite, in words; None: there is none.
    The same answer on all ranks.

    No step makes such a value rightly: one whose gradient overflows is skipped, and changes neither weights nor
    moments. Each rank reads what it keeps once, where it lies.
    """
    mesh = trainer.mesh
    world = mesh.group("world")
    names = _non_finite_names((name, part.tensor) for name, part in state_of(trainer))
    most = largest(torch.tensor(len(names), dtype=torch.int32, device=mesh.device), world)
    return _first_ranks(mesh, gather_objects(names, world)) if int(most) else None


def _non_finite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors with a value that is not finite.

    What is not finite spreads to the norm, which one fused kernel has for many tensors. The norm of finite values
    overflows as well if they are large enough: those tensors are looked at by themselves.
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
