"""Mean loss of a model on held-out batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pangu.collectives.reduce import all_reduce
from pangu.data.batch import Batch
from pangu.models.language_model import LanguageModel
from pangu.topology.mesh import Mesh


@torch.no_grad()
def mean_loss(model: LanguageModel, batches: Iterable[Batch], mesh: Mesh) -> float:
    """Negative log-likelihood per target token, in nats, over the batches of all replicas; dropout is off.

    Replicas may hold different numbers of batches: they meet only once, at the end. Perplexity is exp of the result.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        here = batch.to(mesh.device)
        sums[0] += model.loss(here)
        sums[1] += here.weights.sum()
    loss, targets = all_reduce(sums, mesh.group("data")).tolist()
    return loss / max(targets, 1.0)
