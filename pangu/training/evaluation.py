"""Benchmarks during training."""

from __future__ import annotations

from pathlib import Path

from pangu.config.schema import RunConfig
from pangu.data.sources import Sources
from pangu.evaluation.tasks.ask import ask, read_questions, summary
from pangu.evaluation.tasks.catalogue import find_task
from pangu.evaluation.tasks.prompts import Setup
from pangu.training.assemble import in_training
from pangu.training.step import Trainer


class Evaluation:
    """The tasks of `evaluate.tasks`, with the same questions every time and in every layout."""

    def __init__(self, config: RunConfig, sources: Sources) -> None:
        """Raises UserError if a task's files are missing or of another format."""
        evaluate = config.evaluate
        assert evaluate.data is not None
        setup = Setup(evaluate.shots, config.train.seed, limit=evaluate.limit)
        folder = Path(evaluate.data)
        self._questions = [read_questions(find_task(name), folder / name, setup) for name in evaluate.tasks]
        self._config = config
        self._tokenizer = sources.tokenizer

    def figures(self, trainer: Trainer) -> dict[str, float]:
        """`task/measure` -> figure, on every process; all of them call it together."""
        model = in_training(self._config, trainer, self._tokenizer)
        found: dict[str, float] = {}
        for questions in self._questions:
            answers = [answer for some in ask(model, questions) for answer in some]
            found |= {f"{questions.task.name}/{name}": figure for name, figure in summary(answers).items()}
        return found
