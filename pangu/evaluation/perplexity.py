"""Mean loss of a model on held-out batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pangu.collectives.reduce import all_reduce
from pangu.data.batch import Batch
from pangu.pipeline.runner import Runner
from pangu.pipeline.schedule import Schedule, forward_only
from pangu.topology.mesh import Mesh


def mean_loss(runner: Runner, schedule: Schedule, batches: Sequence[Batch], mesh: Mesh) -> float:
    """Negative log-likelihood per target token, in nats, over the batches of all replicas; dropout is off.

    Replicas may hold different numbers of batches: they meet only once, at the end. Perplexity is exp of the result.

    Args:
        runner: of this rank's stage.
        schedule: of training; its stages are used.
        batches: of this replica, the same on all its stages.
        mesh: who else takes part.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    here = [batch.to(mesh.device) for batch in batches]
    losses = runner.forward(forward_only(schedule, len(here)), here, runner.model.loss_of) if here else []
    for loss, batch in zip(losses, here, strict=bool(losses)):
        sums[0] += loss
        sums[1] += batch.weights.sum()
    loss, targets = all_reduce(all_reduce(sums, mesh.group("data")), mesh.group("pipeline")).tolist()
    return loss / max(targets, 1.0)
