"""Validation during training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.data.stream import Stream
from pangu.evaluation.perplexity import mean_loss
from pangu.pipeline.runner import Runner
from pangu.pipeline.schedule import Schedule
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
        self._count = min(config.validation.sequences, stream.num_samples)
        # every replica has as many micro-batches as the others, so that they may meet in each: indices from `_count` on
        # are there for company and do not count
        rounds = -(-self._count // mesh.layout.data)
        mine = [mesh.at.data + place * mesh.layout.data for place in range(rounds)]
        size = config.batch.micro_size
        self._micro_batches = [mine[start : start + size] for start in range(0, rounds, size)]
        self._stream = stream
        self._packing = config.data.packing
        self._mesh = mesh

    def loss(self, runner: Runner, schedule: Schedule) -> float:
        """Mean negative log-likelihood per held-out target token, by a model in training; `schedule` is that of it."""
        return mean_loss(runner, schedule, [self._batch(indices) for indices in self._micro_batches], self._mesh)

    def _batch(self, indices: Sequence[int]) -> Batch:
        held_out = [min(index, self._count - 1) for index in indices]
        batch = make_batch(np.stack([self._stream[i] for i in held_out]), held_out, self._packing)
        batch.weights[[index >= self._count for index in indices]] = 0.0
        return batch
