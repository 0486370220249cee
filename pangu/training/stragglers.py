"""Detection of ranks that compute longer than others (`faults.stragglers`)."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median_low

from pangu.collectives.reduce import gather_objects
from pangu.config.faults import FaultsConfig
from pangu.data.batch import Batch
from pangu.schedule.actions import COMPUTE, Action
from pangu.topology.member import VARIABLE
from pangu.topology.recorder import Tape
from pangu.training.profile import breakdown
from pangu.training.staying import exchange
from pangu.training.step import Trainer

log = logging.getLogger("pangu")

LOOKS, SLOW_LOOKS = 5, 3
"""Comparisons that are remembered, and those among them in which a rank that is exchanged was slow."""


class Stragglers:
    """Comparisons of the ranks' compute times, with the ranks that are slow again and again."""

    def __init__(self, trainer: Trainer, config: FaultsConfig) -> None:
        """Prepare for a trainer's steps; warn if `faults.stragglers=act` has no launcher that could act."""
        self._trainer, self._config = trainer, config
        self._looks = deque[dict[int, float]](maxlen=LOOKS)
        self.slow: list[int] = []
        """Ranks to exchange, equal on all ranks."""
        self._acts = config.stragglers == "act"
        if self._acts and VARIABLE not in os.environ:
            log.warning("faults.stragglers=act: slow ranks are only named without scripts/launch.py --spares")
            self._acts = False

    def forward_backward(self, batches: Sequence[Batch]) -> dict[int, float] | None:
        """Run forward and backward of a step; return the stragglers, if they are looked for."""
        trainer, every = self._trainer, self._config.straggler_every
        if not every or (trainer.step + 1) % every or trainer.mesh.recorder.tape is not None:
            trainer.forward_backward(batches)
            return None
        found = find_stragglers(trainer, batches, self._config.straggler_factor)
        if self._acts:
            self._looks.append(found)
            counts = Counter(rank for look in self._looks for rank in look)
            self.slow = sorted(rank for rank, count in counts.items() if count >= SLOW_LOOKS)
            if self.slow and not exchange(trainer.mesh, self.slow, now=False):  # so that nothing is saved for it
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
    mesh.recorder.tape = Tape("update", mesh.device)
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
