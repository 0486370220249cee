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
    """Standard deviations above the mean of earlier steps from which on a loss counts as a spike; a non-finite loss
    always does. null: no detection."""
    spike_window: Annotated[int, Bounds(least=2, most=2**31 - 1)]
    """Steps for the mean and the deviation; no loss is a spike before as many."""
    max_skipped: Natural
    """Skipped steps in a row that are tolerated; one more is a fault."""
    skip_after: Natural
    """Batches after the faulty one that a rollback skips, too."""
    max_rollbacks: Count
    """Rollbacks after which a further fault ends the run with an error."""
    straggler_every: Natural
    """Steps between comparisons of the ranks' compute times; 0: none."""
    straggler_factor: Annotated[float, Bounds(above=1)]
    """Factor above the median compute time, beyond the work of its layers, from which on a rank is reported as slow.
    Pipeline waits do not count; ranks that split matrices, or weights under ZeRO-3, are slow together."""
    stragglers: Literal["name", "act"] = "name"
    """Reaction to slow ranks. `name`: a line in the log; `act`: a rank that is slow in 3 of 5 comparisons is exchanged
    for a spare of `scripts/launch.py --spares`, or else its replica gets fewer micro-batches."""
    proven_after: Count = 50
    """Good steps after which a checkpoint is proven. A fault before that, or a second one after it, condemns the
    checkpoint, and no run continues from it automatically. The last proven one is always kept."""
    verify_weights: bool = False
    """Compare in every step, bit for bit, the weights that several ranks computed with alike, in the message of the
    gradient norm. A difference names rank and host, and is a fault of a device, its memory or a link: see `action`; a
    rollback leaves no batches out."""
    recheck: Natural = 0
    """Steps between rechecks, in which all replicas compute the same micro-batch and compare, bit for bit, its loss and
    gradients; 0: none. A difference names rank and host, as `verify_weights` does. A spike is computed again in place
    and on all replicas before `action`: it is of the data if all bits agree. Needs `train.deterministic=true`."""
