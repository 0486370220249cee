"""Evaluation of a model on the questions of a task, by commands and between the steps of a training run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pangu.common.errors import UserError
from pangu.config.schema import RunConfig
from pangu.evaluation.generation import generate_shared
from pangu.evaluation.inference import LoadedModel
from pangu.metrics.record import perplexity
from pangu.tasks.catalogue import find_task
from pangu.tasks.prompts import Prompts, Setup, chosen
from pangu.tasks.scoring import Score, score
from pangu.tasks.task import SLOT, Item, Task, find_files, published_format

CHUNK = 16
"""Micro-batches per replica between two yields of answers."""


@dataclass(frozen=True)
class Answer:
    """Result of one question."""

    id: str
    response: str | None
    """Answer that the model chose or generated; None for tasks without one."""
    figures: dict[str, float]
    """Measures of the answer; losses in nats, with their numbers of tokens, words and bytes."""


@dataclass(frozen=True)
class Questions:
    """Task with its questions, read from its files."""

    task: Task
    setup: Setup
    items: Sequence[Item]
    pool: Sequence[Item]
    """Items that examples are taken from."""


def read_questions(task: Task, folder: Path, setup: Setup) -> Questions:
    """Read a benchmark's files. Raises UserError if they are missing, invalid, or hold too few examples."""
    if setup.shots and not task.train:
        raise UserError(f"shots = {setup.shots}: task {task.name} has no examples; use 0")
    pool = list(_read(task, folder, task.train)) if setup.shots else []
    if setup.shots > len(pool):
        raise UserError(f"shots = {setup.shots}: {folder} has {len(pool)} training examples; use at most {len(pool)}")
    items = list(_read(task, folder, task.test))
    if not items:
        raise UserError(f"{folder}: {', '.join(task.test)} has no questions with answers; use the published files")
    slots = set(re.findall(r"\{(\w+)\}", task.template)) - {"answer"}
    if task.template.count(SLOT) != 1 or not slots <= set(items[0].fields):
        known = ", ".join(f"{{{name}}}" for name in items[0].fields)
        raise UserError(f"template {task.template!r}: must contain {SLOT} once, and may contain {known}")
    return Questions(task, setup, chosen(items, task, setup), pool)


def _read(task: Task, folder: Path, patterns: Sequence[str]) -> Iterator[Item]:
    for path in find_files(folder, patterns):
        with published_format(path):
            yield from task.read(path)


def ask(model: LoadedModel, questions: Questions, done: Collection[str] = ()) -> Iterator[list[Answer]]:
    """Answer the questions whose ids are not `done`, and yield the answers in batches.

    All ranks of all replicas call this together and get the same answers. Raises UserError if the model has no
    tokenizer.
    """
    task, setup = questions.task, questions.setup
    if model.tokenizer is None:
        raise UserError(f"task {task.name}: the model has no tokenizer; set data.tokenizer in its run")
    prompts = Prompts(task, setup, model.tokenizer, model.first, model.config.sequence, questions.pool, model.bos)
    items = [prompts.narrowed(item) if task.method == "rank" else item for item in questions.items]
    items = [item for item in items if item.id not in done]
    # what is asked together is of like length, so that little padding is computed
    items.sort(key=lambda item: sum(map(len, item.fields.values())) + max(map(len, item.answers)), reverse=True)
    size = CHUNK * model.rows * model.mesh.layout.data
    for start in range(0, len(items), size):
        chunk = items[start : start + size]
        yield _written(model, prompts, chunk) if task.method == "write" else _scored(model, prompts, chunk)


def summary(answers: Iterable[Answer]) -> dict[str, float]:
    """Return mean measures in percent, and overall perplexities per token, per word (if counted) and bits per byte."""
    totals: dict[str, float] = {}
    number = 0
    for answer in answers:
        number += 1
        for name, figure in answer.figures.items():
            totals[name] = totals.get(name, 0.0) + figure
    loss, tokens, words, num_bytes = (totals.pop(name, 0.0) for name in ("loss", "tokens", "words", "bytes"))
    measures = {name: 100 * total / number for name, total in totals.items()}
    if tokens:
        measures["perplexity"] = perplexity(loss / tokens)
    if words:
        measures["word_perplexity"] = perplexity(loss / words)
    if num_bytes:
        measures["bits_per_byte"] = loss / math.log(2) / num_bytes
    return measures


def _scored(model: LoadedModel, prompts: Prompts, items: Sequence[Item]) -> list[Answer]:
    """Answer by the probabilities that the model assigns."""
    spans = [prompts.spans(item) for item in items]
    scores = iter(score(model, [span for some in spans for span in some]))
    scored = [(item, [next(scores) for _ in some]) for item, some in zip(items, spans, strict=True)]
    if prompts.task.method == "rank":
        return [_ranked(*pair) for pair in scored]
    answers = [_likely(*pair, word=prompts.task.method == "word") for pair in scored]
    if prompts.setup.recipe == "huggingface":
        for answer in answers:
            del answer.figures["bytes"]  # its loss is not that of all bytes
    return answers


def _ranked(item: Item, scores: Sequence[Score]) -> Answer:
    means = [one.loss / max(1, one.tokens) for one in scores]
    best = means.index(min(means))
    return Answer(item.id, item.answers[best], {"accuracy": float(best == item.right)})


def _likely(item: Item, scores: Sequence[Score], word: bool) -> Answer:
    """Return the likelihood of the text; of a word, also whether greedy decoding generates it."""
    figures = {
        "loss": sum(one.loss for one in scores),
        "tokens": float(sum(one.tokens for one in scores)),
        "words": float(item.words),
    }
    if word:
        figures["accuracy"] = float(all(one.greedy for one in scores))
    else:
        figures["bytes"] = float(len(item.answers[item.right].encode()))
    return Answer(item.id, None, figures)


def _written(model: LoadedModel, prompts: Prompts, items: Sequence[Item]) -> list[Answer]:
    """Answer with the text that the model generates up to the end of the line; the replicas share the questions."""
    task, tokenizer = prompts.task, prompts.tokenizer
    assert task.decoding is not None
    assert task.measure is not None
    line_break = tuple(token for token in tokenizer.encode("\n")[-1:] if tokenizer.decode([token]) == "\n")
    sampling = replace(task.decoding, seed=prompts.setup.seed, stop=line_break)
    texts = generate_shared(model, [prompts.prompt(item) for item in items], sampling)
    answers = []
    for item, ids in zip(items, texts, strict=True):
        written = tokenizer.decode(ids).strip().split("\n")[0]
        answers.append(Answer(item.id, written, task.measure(written, item.answers)))
    return answers


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
