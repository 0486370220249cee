"""Checks of the devices: weights compared in every step, and micro-batches that all replicas compute (`faults`)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects
from pangu.data.batch import Batch
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.faults import not_finite
from pangu.training.process import Heartbeat
from pangu.training.replicas import find_weight_difference, named
from pangu.training.step import StepResult, Trainer

log = logging.getLogger("pangu")

Digests = Sequence[int]
"""Digest of each rank, in rank order."""


class DeviceChecks:
    """Checks of the devices of a run, with what they have found so far."""

    def __init__(self, trainer: Trainer, heartbeat: Heartbeat) -> None:
        """Prepare for a trainer's steps; warn if `faults.recheck` has no second replica to compare with."""
        self._trainer, self._heartbeat = trainer, heartbeat
        self.batches: Sequence[Batch] = ()
        """This rank's micro-batches of the step that `judge` is asked about."""
        self._intact = trainer.step
        """Last step after which all replicas computed alike."""
        self._found: tuple[str, int] | None = None
        """Fault found before the current step, which the next result is told, and the last intact step."""
        self._told: str | None = None
        """Difference of the weights in the last step."""
        self.rechecks = trainer.config.faults.recheck > 0
        if self.rechecks and trainer.mesh.layout.data < 2 * coupled_replicas(trainer.mesh.layout):
            log.warning("faults.recheck: nothing is rechecked, because there is no second replica to compare with")
            self.rechecks = False

    def before_step(self, batches: Sequence[Batch]) -> None:
        """Let all replicas compute one micro-batch of the step that begins, of each replica in turn, if it is due."""
        trainer, every = self._trainer, self._trainer.config.faults.recheck
        if not self.rechecks or trainer.step % every:
            return
        self._intact = min(self._intact, trainer.step)  # the run may have gone back
        with trainer.mesh.recorder.span("interlude"):
            wrong, _ = self._compute(batches[:1], trainer.step // every % trainer.mesh.layout.data)
        if wrong is None:
            self._intact = trainer.step
        else:
            self._found = wrong, self._intact

    def find(self, result: StepResult) -> tuple[str, int] | None:
        """Return the fault of a device that a step shows, and the last step that is intact; equal on all ranks."""
        found, self._found = self._found, None
        told, self._told = self._told, None
        if found is not None:
            return self._note(*found)
        if result.weight_sums is None:
            return None
        self._told = find_weight_difference(self._trainer, result.weight_sums)
        if self._told == told and self._trainer.config.faults.action == "warn":
            return None  # nothing has changed since it was told
        # the weights of this step are those after the one before
        fault = f"weights differ (faults.verify_weights): {self._told}; check the device"
        return self._note(fault, self._trainer.step - 2)

    def _note(self, fault: str, intact: int) -> tuple[str, int]:
        self._heartbeat.counts = {**self._heartbeat.counts, "device_fault": fault}
        return fault, intact

    def judge(self, fault: str, result: StepResult) -> tuple[str, int | None]:
        """Compute the micro-batches of a faulty step again; return the fault, and what is intact if a device did it.

        Those of the replica where the fault began are computed in place and on all other replicas. Different bits mean
        that a device is wrong. So do gradients that are finite now and were not, with the same weights and scale.
        """
        trainer, mesh = self._trainer, self._trainer.mesh
        if not self.rechecks or trainer.config.faults.action == "warn":  # the next step's gradients are still needed
            return fault, None
        names = gather_objects(not_finite(result.norms), mesh.group("world"))
        first = next((rank for rank, of_rank in enumerate(names) if of_rank), None)
        owner = trainer.step % mesh.layout.data if first is None else mesh.layout.coordinates(first).data
        wrong, is_finite = self._compute(self.batches, owner)
        if wrong is None and first is not None and is_finite and trainer.config.precision.loss_scale is None:
            wrong = f"gradients that were not finite are so when computed again: {named(mesh, first)}; check the device"
        if wrong is None:
            return f"{fault}; computed again on all replicas with the same bits, so no device is at fault", None
        return self._note(f"{fault}; {wrong}", self._intact)

    def _compute(self, batches: Sequence[Batch], owner: int) -> tuple[str | None, bool]:
        """Let all replicas compute the micro-batches of replica `owner`.

        Return the ranks that are wrong as a text (None: none are), and whether all gradients were finite.
        """
        trainer, mesh = self._trainer, self._trainer.mesh
        world, all_finite = mesh.group("world"), True
        is_owner = mesh.at.data == owner and mesh.at.context == 0
        for batch in batches:
            shared = _share(batch, is_owner, mesh)
            rounds = list[Digests]()
            while len(rounds) < 2:  # the second time shows which rank differs from itself
                digests = gather_objects(trainer.digest(shared), world)
                rounds.append([digest for digest, _ in digests])
                all_finite &= all(finite for _, finite in digests)
                if len(rounds) == 1 and not wrong_ranks(mesh.layout, rounds):
                    break
            if wrong := wrong_ranks(mesh.layout, rounds):
                ranks = ", ".join(named(mesh, rank) for rank in wrong)
                return f"replicas compute other bits (faults.recheck): {ranks}; check the device", all_finite
        return None, all_finite


def coupled_replicas(layout: Layout) -> int:
    """Return the number of neighboring replicas that compute together, because they share experts; 1 without."""
    ranks, experts = layout.context * layout.tensor, layout.expert * (layout.expert_tensor or layout.tensor)
    return math.lcm(ranks, experts) // ranks


def wrong_ranks(layout: Layout, rounds: Sequence[Digests]) -> list[int]:
    """Return the ranks whose digests of a micro-batch differ from the most common one of ranks at the same place.

    Where no digest is the most common one, as with two replicas that differ every time alike, all are returned.
    """
    coupled = coupled_replicas(layout)
    places = dict[tuple[int, ...], list[int]]()
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        places.setdefault((at.pipeline, at.context, at.tensor, at.data % coupled), []).append(rank)
    wrong = set[int]()
    for ranks in places.values():
        counts = Counter(digests[rank] for digests in rounds for rank in ranks)
        (common, most), *rest = counts.most_common(2)
        tie = any(count == most for _, count in rest)
        if rest:
            wrong |= {rank for rank in ranks if tie or any(digests[rank] != common for digests in rounds)}
    return sorted(wrong)


def _share(batch: Batch, is_owner: bool, mesh: Mesh) -> Batch:
    """Return the owner's micro-batch on all replicas."""
    content = {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in vars(batch).items()}
    everyone = gather_objects(content if is_owner else None, mesh.group("replicas"))
    (received,) = (one for one in everyone if one is not None)
    made: dict[str, Any] = {
        name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in received.items()
    }
    return Batch(**made).to(mesh.device)
