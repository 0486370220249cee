"""Validation during training."""

from __future__ import annotations

import numpy as np

from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.data.stream import Stream
from pangu.evaluation.perplexity import mean_loss
from pangu.models.language_model import LanguageModel
from pangu.topology.mesh import Mesh


class Validation:
    """The first `validation.sequences` held-out samples, the same ones every time and in every layout."""

    def __init__(self, config: RunConfig, stream: Stream, mesh: Mesh) -> None:
        """
        Args:
            config: the run.
            stream: held-out samples in plain order.
            mesh: the replicas share the samples.
        """
        assert stream.num_samples is not None
        count = min(config.validation.sequences, stream.num_samples)
        mine = range(mesh.at.data, count, mesh.layout.data)
        size = config.batch.micro_size
        self._micro_batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        self._stream = stream
        self._packing = config.data.packing
        self._mesh = mesh

    def loss(self, model: LanguageModel) -> float:
        """Mean negative log-likelihood per held-out target token."""
        return mean_loss(model, map(self._batch, self._micro_batches), self._mesh)

    def _batch(self, indices: range) -> Batch:
        return make_batch(np.stack([self._stream[i] for i in indices]), tuple(indices), self._packing)
