"""Configuration of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pangu.config.bounds import Filename, Natural, Positive


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving of checkpoints, and the initial state of a run."""

    every: Natural
    """Steps between checkpoints; the last step is always saved. 0: no checkpoints at all."""
    asynchronous: bool
    """Write checkpoints while training continues, from a copy that takes as much host memory; on an accelerator, the
    copy overlaps the next step, too. false: training waits until the checkpoint is written."""
    keep: Natural
    """Number of newest checkpoints to keep; 0: all."""
    keep_every: Natural
    """Keep checkpoints at multiples of this many steps forever; 0: none."""
    resume: Filename
    """`auto`: continue if the run folder holds a checkpoint; `none`: refuse a run folder that holds one; otherwise the
    path of a checkpoint folder to continue from."""
    init_from: Filename | None
    """Path of a checkpoint folder whose weights, and nothing else, initialize a new run (fine-tuning). A run folder
    that already holds a checkpoint follows `resume` instead. null: random initialization."""
    # younger than the first run folders, whose config.yaml lacks them
    upcycle: bool = False
    """Initialize experts from a dense checkpoint in `init_from`: each expert is a copy of its layer's dense
    feed-forward layer (Komatsuzaki et al. 2022), and the router is initialized as in a new run. The first logits equal
    the dense model's, as the weights of a token's experts sum to 1."""
    max_failed_saves: Natural = 3
    """Number of consecutive failed saves that are tolerated; one more ends the run."""
    memory_every: Natural = 0
    """Steps between copies of the state in node memory, which the next node also keeps and from which a run continues
    after a crash or the loss of a node. They are stored in `/dev/shm`, or in the folder that `PANGU_MEMORY` names on
    each node, and take up to six times the state of the node's ranks. 0: none."""
    remote: Filename | None = None
    """URL of a folder in an object store (`s3://BUCKET/RUN`, `gs://`) or a file system (`file://`) to which checkpoints
    are copied while training continues, and from which a run with an empty run folder continues. null: none."""
    keep_every_hours: Positive | None = None
    """Keep the first checkpoint of every period of this many hours (UTC) forever, besides the newest. null: none."""
    keep_best: Natural = 0
    """Number of checkpoints with the lowest validation loss to keep besides the newest, among those of validated steps;
    0: none."""
    verify_every_hours: Positive | None = None
    """Hours between verifications of each checkpoint in the run folder: a thread of the first rank slowly reads it
    again and reports bit rot. null: none."""
