"""A model that is asked, not trained: one that was loaded, or the one in training in between."""

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
from pangu.pipeline.schedule import Schedule, forward_only
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that is spread over the ranks of a mesh. What is asked of it, all ranks of one replica ask together."""

    runner: Runner
    """Of this rank's stage; `runner.model` is what this rank holds."""
    schedule: Schedule
    """Its stages are used."""
    mesh: Mesh
    config: ModelConfig
    """The architecture; `config.sequence` is the longest text."""
    tokenizer: Tokenizer | None
    """Of the data that it was trained on, if that has one."""
    eod: int | None
    """Id that ends a document, if there is one."""
    rows: int = 8
    """Texts computed at a time."""
    stop: tuple[int, ...] = ()
    """Ids that end a generated text beside `eod`."""
    bos: int | None = None
    """Id before each text, if there is one."""
    read_template: Callable[[], str | None] = lambda: None
    """Return the template of the conversations that it was fine-tuned on, as Jinja, if it was. Raises UserError."""

    @property
    def first(self) -> int | None:
        """Id that the first token of a text is predicted from: `bos`, or the end of another document."""
        return self.eod if self.bos is None else self.bos


def padded_length(longest: int, layout: Layout) -> int:
    """Tokens that texts of at most so many are filled up to: as few as the ranks that share a sequence can deal out."""
    multiple = math.lcm(layout.tensor if layout.sequence else 1, 2 * layout.context if layout.context > 1 else 1)
    return longest + -longest % multiple


def mean_loss(runner: Runner, schedule: Schedule, batches: Sequence[Batch], mesh: Mesh) -> float:
    """Negative log-likelihood per target token, in nats, over the batches of all replicas; dropout is off.

    `batches` are those of this replica, the same on all its stages. Replicas may hold different numbers of them: they
    meet only once, at the end. Perplexity is exp of the result.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    batches = [batch.cut(runner.model.context).to(mesh.device) for batch in batches]
    losses = runner.forward(forward_only(schedule, len(batches)), batches, runner.model.loss_of) if batches else []
    for loss, batch in zip(losses, batches, strict=bool(losses)):
        sums[0] += loss
        sums[1] += batch.weights.sum()
    loss, targets = all_reduce(all_reduce(sums, mesh.group("replicas")), mesh.group("pipeline")).tolist()
    return loss / max(targets, 1.0)
