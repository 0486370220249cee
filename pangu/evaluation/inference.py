"""Model for inference: one that was loaded, or the one in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pangu.collectives.reduce import all_reduce
from pangu.config.model import ModelConfig
from pangu.data.batch import Batch
from pangu.pipeline.runner import Runner
from pangu.schedule.schedule import Schedule, forward_only
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """Model distributed over the ranks of a mesh; all ranks of one replica use it together."""

    runner: Runner
    """Runner of this rank's stage; `runner.model` is this rank's part."""
    schedule: Schedule
    """Schedule, of which only the placement of stages is used."""
    mesh: Mesh
    config: ModelConfig
    """Architecture; `config.sequence` is the longest text."""
    tokenizer: Tokenizer | None
    """Tokenizer of the training data, if there is one."""
    eod: int | None
    """Id that ends a document, if there is one."""
    rows: int = 8
    """Number of texts computed at a time."""
    stop: tuple[int, ...] = ()
    """Ids that end a generated text, besides `eod`."""
    bos: int | None = None
    """Id before each text, if there is one."""
    read_template: Callable[[], str | None] = lambda: None
    """Function that returns the chat template (Jinja) of fine-tuning, or None. Raises UserError."""

    @property
    def first(self) -> int | None:
        """Id that the first token of a text is predicted from: `bos`, or the end of another document."""
        return self.eod if self.bos is None else self.bos


def padded_length(longest: int, layout: Layout) -> int:
    """Return the padded length of texts: the smallest one that the ranks of a layout can split along the sequence."""
    multiple = math.lcm(layout.tensor if layout.sequence else 1, 2 * layout.context if layout.context > 1 else 1)
    return longest + -longest % multiple


def mean_loss(runner: Runner, schedule: Schedule, batches: Sequence[Batch], mesh: Mesh) -> float:
    """Return the negative log-likelihood per target token, in nats, over the batches of all replicas, without dropout.

    `batches` are those of this replica, the same on all its stages. Replicas may hold different numbers of them, as
    they communicate only once, at the end. Perplexity is exp of the result.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    batches = [batch.cut(runner.model.context).to(mesh.device) for batch in batches]
    losses = runner.forward(forward_only(schedule, len(batches)), batches, runner.model.loss_of) if batches else []
    for loss, batch in zip(losses, batches, strict=bool(losses)):
        sums[0] += loss
        sums[1] += batch.weights.sum()
    loss, targets = all_reduce(all_reduce(sums, mesh.group("replicas")), mesh.group("pipeline")).tolist()
    return loss / max(targets, 1.0)
