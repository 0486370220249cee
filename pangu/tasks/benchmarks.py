"""Benchmarks between the steps of a training run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from pangu.config.schema import RunConfig
from pangu.evaluation.inference import LoadedModel
from pangu.tasks.ask import ask, read_questions, summary
from pangu.tasks.catalogue import find_task
from pangu.tasks.prompts import Setup


def read_benchmarks(config: RunConfig) -> Callable[[LoadedModel], dict[str, float]]:
    """Read the questions of `evaluate.tasks`, which are equal every time and in every layout.

    Returns:
        Function that asks a model and returns the figures by `task/measure`; all processes call it together.

    Raises:
        UserError: if a task's files are missing or of another format.
    """
    evaluate = config.evaluate
    assert evaluate.data is not None
    setup = Setup(evaluate.shots, config.train.seed, limit=evaluate.limit)
    tasks = [read_questions(find_task(name), Path(evaluate.data) / name, setup) for name in evaluate.tasks]

    def measure(model: LoadedModel) -> dict[str, float]:
        figures: dict[str, float] = {}
        for questions in tasks:
            answers = summary(list(chain.from_iterable(ask(model, questions))))
            figures |= {f"{questions.task.name}/{name}": figure for name, figure in answers.items()}
        return figures

    return measure
