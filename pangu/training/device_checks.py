"""Checks of devices (`faults`): slow ranks, weights compared in every step, micro-batches computed by all replicas."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects
from pangu.config.faults import FaultsConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch
from pangu.pipeline.stages import compute_apart
from pangu.schedule.actions import COMPUTE, Action
from pangu.topology.launch import MEMBER
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import ActiveRecording
from pangu.training.elastic import replace_ranks
from pangu.training.faults import not_finite
from pangu.training.process import Heartbeat
from pangu.training.profile import breakdown
from pangu.training.replicas import find_weight_difference, named
from pangu.training.stages import BatchStages
from pangu.training.step import StepResult, Trainer
from pangu.zero.gradients import Norms

log = logging.getLogger("pangu")

Digests = Sequence[int]
"""Digest of each rank, in rank order."""
LOOKS, SLOW_LOOKS = 5, 3
"""Comparisons that are remembered, and those among them in which a rank that is exchanged was slow."""


class DeviceChecks:
    """Checks of the devices of a run, with what they have found so far."""

    def __init__(self, trainer: Trainer, heartbeat: Heartbeat) -> None:
        """Prepare for a trainer's steps; warn if `faults.recheck` has no second replica to compare with."""
        self._trainer, self._heartbeat, config = trainer, heartbeat, trainer.config
        self.computed: tuple[Sequence[Batch], RunConfig] = (), config
        """This rank's micro-batches of the step that `diagnose` is asked about, and the configuration of its stage."""
        every = max(config.faults.recheck, 1)
        self._intact = max(trainer.step - 1, 0) // every * every
        """Last step after which all replicas computed alike; for a run that continues, its last recheck."""
        self.found: tuple[str, int] | None = None
        """Fault found before the current step, to be reported with the next result, and the last intact step."""
        self.wrong: Sequence[int] = ()
        """Ranks that the last recheck has found to compute wrongly."""
        self._last_difference: str | None = None
        """Difference of the weights in the last step."""
        self.rechecks = config.faults.recheck > 0
        if self.rechecks and trainer.mesh.layout.data < 2 * coupled_replicas(trainer.mesh.layout):
            log.warning("faults.recheck: nothing is rechecked, because there is no second replica to compare with")
            self.rechecks = False
        self.repeats = self.rechecks and config.faults.action != "warn"  # which needs the next step's gradients
        """True if faulty steps are computed again, so that a spike must not change weights before."""

    def before_step(self, batches: Sequence[Batch]) -> None:
        """Let all replicas compute one micro-batch of the step that begins, of each replica in turn, if it is due."""
        trainer, every = self._trainer, self._trainer.config.faults.recheck
        if not self.rechecks or trainer.step % every:
            return
        self._intact = min(self._intact, trainer.step)  # the run may have gone back
        with trainer.mesh.recorder.span("interlude"):
            wrong = self._compute(batches[:1], trainer.step // every % trainer.mesh.layout.data)
        if wrong is None:
            self._intact = trainer.step
        else:
            self.found = wrong, self._intact

    def find(self, result: StepResult) -> tuple[str, int] | None:
        """Return the fault of a device that a step shows, and the last step that is intact; equal on all ranks."""
        found, self.found = self.found, None
        last, self._last_difference = self._last_difference, None
        if found is not None:
            return self._record_fault(*found)
        self.wrong = ()
        if result.weight_sums is None:
            return None
        self._last_difference = find_weight_difference(self._trainer, result.weight_sums)
        if self._last_difference == last and self._trainer.config.faults.action == "warn":
            return None  # nothing has changed since it was logged
        # the weights of this step are those after the one before
        fault = f"weights differ (faults.verify_weights): {self._last_difference}; check the device"
        return self._record_fault(fault, self._trainer.step - 2)

    def _record_fault(self, fault: str, intact: int) -> tuple[str, int]:
        self._heartbeat.counts = {**self._heartbeat.counts, "device_fault": fault}
        return fault, intact

    def diagnose(self, fault: str, result: StepResult) -> tuple[str, int | None]:
        """Compute the micro-batches of a faulty step again; return the fault, and what is intact if a device did it.

        If it was skipped, all ranks compute their own again, in place. Then all replicas compute those of the replica
        where the fault began. Different bits mean that a device is wrong.
        """
        trainer, (batches, config) = self._trainer, self.computed
        if not self.repeats or not batches:  # the step was made before a rank was lost
            return fault, None
        has_scales = config.precision.loss_scale is not None or trainer.scales is not None  # which have changed since
        in_place = result.skipped and not has_scales
        current, number = trainer.config, trainer.stages.schedule.micro_batches
        trainer.enter_stage(config, len(batches))
        trainer.step -= 1
        try:
            wrong = self._repeat(batches, result.norms) if in_place else None
            wrong = wrong or self._compute(batches, self._origin(result.norms))
        finally:
            trainer.step += 1
            trainer.enter_stage(current, number)
        if wrong is not None:
            return self._record_fault(f"{fault}; {wrong}", self._intact)
        again = "in place and on all replicas with the same bits, so no device is at fault"
        return f"{fault}; recomputed {again if in_place else 'on all replicas with the same bits'}", None

    def _repeat(self, batches: Sequence[Batch], norms: Norms) -> str | None:
        """Compute a skipped step again, whose weights are still there; return who gets other `norms` (None: none)."""
        trainer = self._trainer
        trainer.forward_backward(batches)
        differs = str(_values(trainer.local_norms())) != str(_values(norms))  # as text, so that NaN is NaN
        wrong = [rank for rank, other in enumerate(gather_objects(differs, trainer.mesh.group("world"))) if other]
        return self._text("recomputed with different bits", wrong)

    def _origin(self, norms: Norms) -> int:
        """Return the replica with the largest loss, of those with a gradient that is not finite if there are any."""
        mesh, loss = self._trainer.mesh, _values([one for one in norms if one[0][0][0] == "loss"])
        keys = gather_objects((bool(not_finite(norms)), loss), mesh.group("world"))
        return mesh.layout.coordinates(keys.index(max(keys))).data

    def _compute(self, batches: Sequence[Batch], owner: int) -> str | None:
        """Let all replicas compute the micro-batches of replica `owner`; return who is wrong as a text (None: none)."""
        trainer, mesh = self._trainer, self._trainer.mesh
        is_owner = mesh.at.data == owner and mesh.at.context == 0
        counts = gather_objects(len(batches) if is_owner else 0, mesh.group("world"))
        for place in range(max(counts)):
            shared = _share(batches[place] if is_owner else None, mesh)
            rounds = list[Digests]()
            while len(rounds) < 2:  # the second time shows which rank differs from itself
                rounds.append(gather_objects(trainer.digest(shared), mesh.group("world")))
                if len(rounds) == 1 and not wrong_ranks(mesh.layout, rounds):
                    break
            if wrong := wrong_ranks(mesh.layout, rounds):
                return self._text("replicas compute different bits", wrong)
        return None

    def _text(self, what: str, wrong: Sequence[int]) -> str | None:
        self.wrong = wrong
        names = ", ".join(named(self._trainer.mesh, rank) for rank in wrong)
        return f"{what} (faults.recheck): {names}; check the device" if wrong else None


def _values(norms: Norms) -> list[float]:
    return [float(norm) for _, flat_norms in norms for norm in flat_norms]


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


def _share(batch: Batch | None, mesh: Mesh) -> Batch:
    """Return on all replicas the micro-batch of the one that gives it."""
    fields = {} if batch is None else vars(batch)
    content = {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in fields.items()}
    everyone = gather_objects(content or None, mesh.group("replicas"))
    (received,) = (one for one in everyone if one is not None)
    made: dict[str, Any] = {
        name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in received.items()
    }
    return Batch(**made).to(mesh.device)


class Stragglers:
    """Comparisons of the ranks' compute times, with the ranks that are slow again and again."""

    def __init__(self, trainer: Trainer, config: FaultsConfig, stages: BatchStages) -> None:
        """Prepare for a trainer's steps; warn if nothing can be done with `faults.stragglers=act`."""
        self._trainer, self._config, self._stages = trainer, config, stages
        self._looks = deque[dict[int, float]](maxlen=LOOKS)
        self.slow: list[int] = []
        """Ranks to exchange, equal on all ranks."""
        self._acts = config.stragglers == "act"
        if self._acts and MEMBER not in os.environ and not compute_apart(trainer.stages.schedule, trainer.mesh.layout):
            log.warning(
                "faults.stragglers=act: slow ranks are only reported, because there are no spares (scripts/launch.py "
                "--spares) and replicas wait for each other in every micro-batch"
            )
            self._acts = False

    def forward_backward(self, batches: Sequence[Batch]) -> dict[int, float] | None:
        """Run forward and backward of a step; return the stragglers, if they are looked for."""
        trainer, every = self._trainer, self._config.straggler_every
        if not every or (trainer.step + 1) % every or trainer.mesh.recorder.active is not None:
            trainer.forward_backward(batches)
            return None
        found = find_stragglers(trainer, batches, self._config.straggler_factor)
        if self._acts:
            self._looks.append(found)
            counts = Counter(rank for look in self._looks for rank in look)
            slow = sorted(rank for rank, count in counts.items() if count >= SLOW_LOOKS)
            if replace_ranks(trainer.mesh, slow, now=False):  # otherwise nothing is saved for it
                self.slow = slow
            elif slow or len(self._looks) == LOOKS:
                times = {rank: median_low(look[rank] for look in self._looks if rank in look) for rank in slow}
                self._stages.share(trainer, times)
                if slow:
                    self.forget()
        return found or None

    def forget(self) -> None:
        """Begin with no comparison, because the slow ranks stay."""
        self._looks.clear()
        self.slow = []


def find_stragglers(trainer: Trainer, micro_batches: Sequence[Batch], factor: float) -> dict[int, float]:
    """Run `trainer.forward_backward` and return the stragglers, which are logged.

    Compared is the time of forwards and backwards, without waits for other stages, per FLOP of a rank's layers.
    """
    mesh, schedule = trainer.mesh, trainer.stages.schedule
    mesh.recorder.active = ActiveRecording("update", mesh.device)
    trainer.forward_backward(micro_batches)
    recording = mesh.recorder.stop()
    durations = trainer.stages.durations.per_chunk(len(schedule.stage_of))
    actions = [span.what for span in recording.spans if isinstance(span.what, Action) and span.what.kind in COMPUTE]
    flops = sum(durations[action.kind][action.chunk] for action in actions)
    none_waited_for = {axis: [came for came, _ in messages] for axis, messages in recording.messages.items()}
    seconds = breakdown(recording, none_waited_for, {}).parts["compute"]
    stragglers = above_median(gather_objects(seconds / flops, mesh.group("world")), factor)
    for rank, times in stragglers.items():
        name = mesh.named([rank])
        slow = "step %d: %s takes %.1f x the median rank's time; check its device"
        log.warning(slow, trainer.step + 1, name, times, extra={"alert": "straggler"})
    return stragglers


def above_median(seconds: Sequence[float], factor: float) -> dict[int, float]:
    """Return the ranks whose time exceeds `factor` times the (lower) median, with the ratio."""
    median = median_low(seconds)
    return {rank: time / median for rank, time in enumerate(seconds) if time > factor * median}
