"""Measurements during training: validation loss, LAMB's trust ratios."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

from pangu.collectives.reduce import gather_objects
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, Row, batch_of
from pangu.data.boundaries import begin_id
from pangu.data.sources import Sources
from pangu.data.stream import Stream
from pangu.data.tokenizers import Tokenizer
from pangu.evaluation.inference import LoadedModel, mean_loss, padded_length
from pangu.metrics.record import perplexity
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer

Benchmarks = Callable[[LoadedModel], dict[str, float]]
"""Function that asks a model all questions and returns the figures by `task/measure`, on all processes."""


class Validation:
    """Losses on the validation split, and on each of its sources if there are several."""

    def __init__(self, config: RunConfig, sources: Sources, mesh: Mesh) -> None:
        """Prepare the split and its sources."""
        assert sources.validation is not None
        self._whole = Split(config, sources.validation, mesh)
        self._sources = {name: Split(config, stream, mesh) for name, stream in sources.validation_sources.items()}

    def figures(self, trainer: Trainer) -> dict[str, Any]:
        """Return the validation fields of a step's record; all processes call this together."""
        loss = self._whole.loss(trainer)
        losses = {name: split.loss(trainer) for name, split in self._sources.items()}
        return {
            "validation_loss": loss,
            "validation_perplexity": perplexity(loss),
            "validation_sources": {
                name: {"loss": loss, "perplexity": perplexity(loss)} for name, loss in losses.items()
            }
            or None,
        }


class Split:
    """Prefix of a stream: its first `validation.sequences` samples, equal every time and in every layout.

    Samples of similar length are computed together, so that their padding can be cut off.
    """

    def __init__(self, config: RunConfig, stream: Stream, mesh: Mesh) -> None:
        """Assign the held-out samples of `stream`, in plain order, to the replicas of `mesh`."""
        assert stream.num_samples is not None
        self._num_samples = min(config.validation.sequences, stream.num_samples)
        lengths = [config.model.sequence - stream.padding(index) for index in range(self._num_samples)]
        self._order = sorted(range(self._num_samples), key=lambda index: -lengths[index])
        # every replica has as many micro-batches as the others, so that they may meet in each: places from
        # `_num_samples` on are padding and do not count
        rounds, size = -(-self._num_samples // mesh.layout.data), config.batch.micro_size
        places = [mesh.at.data + place * mesh.layout.data for place in range(rounds)]
        self._micro_batches = [
            (places[start : start + size], padded_length(lengths[self._order[start * mesh.layout.data]], mesh.layout))
            for start in range(0, rounds, size)
        ]
        self._stream = stream
        self._packing = config.data.packing
        self._mesh = mesh

    def loss(self, trainer: Trainer) -> float:
        """Return the mean negative log-likelihood per target token."""
        batches = [self._batch(places, length) for places, length in self._micro_batches]
        return mean_loss(trainer.runner, trainer.stages.schedule, batches, self._mesh)

    def _batch(self, places: Sequence[int], length: int) -> Batch:
        indices = [self._order[min(place, self._num_samples - 1)] for place in places]
        samples = [self._stream[index] for index in indices]
        rows = [sample.cut(length) if isinstance(sample, Row) else sample for sample in samples]
        batch = batch_of(rows, indices, self._packing)
        batch.weights[[place >= self._num_samples for place in places]] = 0.0
        return batch


def trust_ratios(trainer: Trainer) -> dict[str, float]:
    """Return LAMB's trust ratio of each tensor in the last step, gathered from all ranks; {} with Adam."""
    return dict(ChainMap(*gather_objects(local_trust_ratios(trainer), trainer.mesh.group("world"))))


def local_trust_ratios(trainer: Trainer) -> dict[str, float]:
    """Return those of this rank's shards."""
    ratios = getattr(trainer.optimizer, "ratios", {})
    return {p.placement.name: float(ratios[p.main]) for p in trainer.parameters.shards if p.main in ratios}


def in_training(config: RunConfig, trainer: Trainer, tokenizer: Tokenizer | None) -> LoadedModel:
    """Return the model that is being trained, for evaluation."""
    schedule, packing, rows = trainer.stages.schedule, config.data.packing, config.batch.micro_size
    bos = begin_id(packing.bos, tokenizer)
    ids = (packing.eod, rows, packing.stop, bos)
    return LoadedModel(trainer.runner, schedule, trainer.mesh, config.model, tokenizer, *ids)
