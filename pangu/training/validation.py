"""Measurements during training: the loss on the validation split, benchmarks, LAMB's ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pangu.collectives.reduce import gather_objects
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.data.sources import Sources
from pangu.data.stream import Stream
from pangu.evaluation.inference import LoadedModel, mean_loss
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer


class Validation:
    """The first `validation.sequences` samples of the validation split, the same ones every time and in every
    layout."""

    def __init__(self, config: RunConfig, stream: Stream, mesh: Mesh) -> None:
        """`stream`: the validation split in plain order; the replicas of `mesh` share its samples."""
        assert stream.num_samples is not None
        self._num_samples = min(config.validation.sequences, stream.num_samples)
        # every replica has as many micro-batches as the others, so that they may meet in each: indices from
        # `_num_samples` on are padding and do not count
        rounds = -(-self._num_samples // mesh.layout.data)
        indices = [mesh.at.data + place * mesh.layout.data for place in range(rounds)]
        size = config.batch.micro_size
        self._micro_batches = [indices[start : start + size] for start in range(0, rounds, size)]
        self._stream = stream
        self._packing = config.data.packing
        self._mesh = mesh

    def loss(self, trainer: Trainer) -> float:
        """Mean negative log-likelihood per target token of the split."""
        batches = [self._batch(indices) for indices in self._micro_batches]
        return mean_loss(trainer.runner, trainer.stages.schedule, batches, self._mesh)

    def _batch(self, indices: Sequence[int]) -> Batch:
        samples = [min(index, self._num_samples - 1) for index in indices]
        batch = make_batch(np.stack([self._stream[i] for i in samples]), samples, self._packing)
        batch.weights[[index >= self._num_samples for index in indices]] = 0.0
        return batch


class Benchmarks:
    """The tasks of `evaluate.tasks`, with the same questions every time and in every layout."""

    def __init__(self, config: RunConfig, sources: Sources) -> None:
        """Raises UserError if a task's files are missing or of another format."""
        # the tasks are a part of the package that most runs do without
        from pangu.evaluation.tasks.ask import read_questions
        from pangu.evaluation.tasks.catalogue import find_task
        from pangu.evaluation.tasks.prompts import Setup

        evaluate = config.evaluate
        assert evaluate.data is not None
        setup = Setup(evaluate.shots, config.train.seed, limit=evaluate.limit)
        folder = Path(evaluate.data)
        self._questions = [read_questions(find_task(name), folder / name, setup) for name in evaluate.tasks]
        self._config = config
        self._tokenizer = sources.tokenizer

    def figures(self, trainer: Trainer) -> dict[str, float]:
        """`task/measure` -> figure, on every process; all of them call it together."""
        from pangu.evaluation.tasks.ask import ask, summary

        model = in_training(self._config, trainer, self._tokenizer)
        figures: dict[str, float] = {}
        for questions in self._questions:
            answers = [answer for some in ask(model, questions) for answer in some]
            figures |= {f"{questions.task.name}/{name}": figure for name, figure in summary(answers).items()}
        return figures


def trust_ratios(trainer: Trainer) -> dict[str, float]:
    """LAMB's ratio of each tensor in the last step, of all ranks on all ranks; none with Adam."""
    ratios = getattr(trainer.optimizer, "ratios", {})
    of_rank = {p.placement.name: float(ratios[p.main]) for p in trainer.shards if p.main in ratios}
    of_ranks = gather_objects(of_rank, trainer.mesh.group("world"))
    return {name: ratio for part in of_ranks for name, ratio in part.items()}


def in_training(config: RunConfig, trainer: Trainer, tokenizer: Tokenizer | None) -> LoadedModel:
    """A model that is being trained, to be asked in between."""
    schedule, packing, rows = trainer.stages.schedule, config.data.packing, config.batch.micro_size
    return LoadedModel(trainer.runner, schedule, trainer.mesh, config.model, tokenizer, packing.eod, rows, packing.stop)
