"""Configuration of how a run handles loss spikes, wrong devices and slow ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Natural, Positive


@dataclass(frozen=True)
class FaultsConfig:
    """Handling of loss spikes, non-finite gradients and slow ranks. A step with such gradients is always skipped."""

    action: Literal["warn", "stop", "rollback"]
    """Reaction to a spike or too many skipped steps. `warn`: a line in the log; `stop`: end the run with an error;
    `rollback`: continue from the newest proven checkpoint, without the batches that led to the fault (Chowdhery et al.
    2022, section 5.1), or from the seed if there is no checkpoint yet."""
    spike: Positive | None
    """Number of standard deviations above the mean of earlier steps above which a loss counts as a spike; a non-finite
    loss always does. null: no detection."""
    spike_window: Annotated[int, Bounds(least=2, most=2**31 - 1)]
    """Number of steps in the mean and the deviation; no loss counts as a spike before that many."""
    max_skipped: Natural
    """Number of consecutive skipped steps that are tolerated; one more is a fault."""
    skip_after: Natural
    """Number of batches after the faulty one that a rollback also skips."""
    max_rollbacks: Count
    """Number of rollbacks after which another fault ends the run with an error."""
    straggler_every: Natural
    """Steps between comparisons of the ranks' compute times; 0: none."""
    straggler_factor: Annotated[float, Bounds(above=1)]
    """Multiple of the median compute time per FLOP of a rank's layers above which the rank is reported as slow.
    Pipeline waits do not count; ranks that split matrices, or weights under ZeRO-3, are slow together."""
    stragglers: Literal["name", "act"] = "name"
    """Reaction to slow ranks. `name`: a line in the log; `act`: a rank that is slow in 3 of 5 comparisons is replaced
    by a spare of `scripts/launch.py --spares`; without one, its replica gets fewer micro-batches."""
    proven_after: Count = 50
    """Good steps after which a checkpoint is proven. A fault before that, or a second one after it, condemns the
    checkpoint, and no run continues from it automatically. The last proven one is always kept."""
    verify_weights: bool = False
    """In every step, compare bit for bit the weights that several ranks hold copies of, within the message of the
    gradient norm. A difference is reported with rank and host, and counts as a fault of a device, its memory or a link:
    see `action`; a rollback skips no batches."""
    recheck: Natural = 0
    """Steps between rechecks, in which all replicas compute the same micro-batch and compare, bit for bit, its loss and
    gradients; 0: none. A difference is reported as by `verify_weights`. A spike is recomputed in place and on all
    replicas before `action`: if all bits agree, the data caused it. Needs `train.deterministic=true`."""
