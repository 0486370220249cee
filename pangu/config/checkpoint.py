"""Configuration of checkpoints, and of what a run does about steps, devices and ranks that go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Filename, Natural, Positive


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving of checkpoints, and the initial state of a run."""

    every: Natural
    """Steps between checkpoints; the last step is always saved. 0 saves nothing at all."""
    asynchronous: bool
    """Write checkpoints while training continues, from a copy in as much host memory; an accelerator overlaps the copy
    with the next step, too. false: training waits until the checkpoint is written."""
    keep: Natural
    """Number of newest checkpoints to keep; 0: all."""
    keep_every: Natural
    """Keep checkpoints at multiples of this many steps forever; 0: none."""
    resume: Filename
    """`auto`: continue if the run folder holds a checkpoint; `none`: refuse a run folder that holds one; otherwise the
    path of a checkpoint folder to continue from."""
    init_from: Filename | None
    """Path of a checkpoint folder whose weights, and nothing else, initialize a new run (fine-tuning). A run folder
    that holds a checkpoint is continued as `resume` says. null: random initialization."""
    # younger than the first run folders, whose config.yaml lacks them
    upcycle: bool = False
    """Initialize experts from a dense checkpoint in `init_from`: each expert is a copy of its layer's dense
    feed-forward layer (Komatsuzaki et al. 2022), and the router is initialized as in a new run. The first logits equal
    the dense model's, as the weights of a token's experts sum to 1."""
    max_failed_saves: Natural = 3
    """Failed saves in a row that are tolerated; one more ends the run."""
    memory_every: Natural = 0
    """Steps between copies of the state in the memory of nodes, of which the next node keeps a second one, and from
    which a run continues after a crash or the loss of a node. They lie in `/dev/shm`, or in the folder that
    `PANGU_MEMORY` names on each node, and take up to six times the state of the node's ranks. 0: none."""
    remote: Filename | None = None
    """URL of a folder in an object store (`s3://BUCKET/RUN`, `gs://`) or of `file://` to which checkpoints are copied
    while training continues, and from which a run with an empty run folder continues. null: none."""
    keep_every_hours: Positive | None = None
    """Keep the first checkpoint of every period of this many hours (of UTC) forever, besides the newest. null: none."""
    keep_best: Natural = 0
    """Number of checkpoints with the lowest validation loss to keep besides the newest, among those of a step that was
    validated; 0: none."""
    verify_every_hours: Positive | None = None
    """Hours between verifications of each checkpoint in the run folder: a thread of the first rank reads it again,
    slowly, and names bit rot. null: none."""


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
    for a spare of `scripts/launch.py --spares`, if there is one."""
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
