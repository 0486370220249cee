"""The configuration of what a run does when a step goes wrong, and what contradicts in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Natural, Positive
from pangu.config.errors import Problem


@dataclass(frozen=True)
class FaultsConfig:
    """Loss spikes, gradients that are not finite step after step, slow ranks. A step whose gradient is not finite is
    skipped in any case."""

    action: Literal["warn", "stop", "rollback"]
    """What follows a spike or too many skipped steps. `warn`: a line in the log; `stop`: the run ends with an error;
    `rollback`: it continues from the newest checkpoint, without the batches that led to the fault (Chowdhery et al.
    2022, section 5.1)."""
    spike: Positive | None
    """A loss is a spike if it is so many standard deviations above the mean of the steps before it, or not finite.
    null: spikes are not looked for."""
    spike_window: Annotated[int, Bounds(least=2, most=2**31 - 1)]
    """Steps that the mean and the deviation are taken over; no loss is a spike before there are as many."""
    max_skipped: Natural
    """More skipped steps in a row than this are a fault."""
    skip_after: Natural
    """Batches behind the one at fault that a rollback leaves out too."""
    max_rollbacks: Count
    """The run ends with an error at a fault that comes after so many rollbacks."""
    slow_every: Natural
    """Steps between comparisons of how long the ranks compute; 0: none."""
    slow_factor: Annotated[float, Bounds(above=1)]
    """A rank is named in the log and in the metrics if it computes longer than the median by this factor. What ranks
    have to do by their layers is allowed for, and time in which a stage waits for others does not count; ranks that
    share matrices, or weights under ZeRO-3, wait for each other inside their layers and are slow together."""


def contradictions(faults: FaultsConfig, saves: bool) -> Iterator[Problem]:
    """Values that do not go together; `saves`: whether the run writes checkpoints."""
    if faults.action == "rollback" and not saves:
        rule = "checkpoint.every = 0 saves nothing to go back to"
        yield Problem("faults.action", "rollback", rule, "stop works, or checkpoint.every=100")
