"""Results of tasks: answers saved as they arrive, for restarts, and figures next to the published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from pangu.common.errors import UserError, writing
from pangu.common.files import parse_json, write_atomically
from pangu.metrics.text import figure
from pangu.tasks.ask import Answer
from pangu.tasks.catalogue import TASKS
from pangu.tasks.task import read_text

MODELS = ("PanGu-α 2.6B", "PanGu-α 13B")

PUBLISHED = {name: task.published for name, task in TASKS.items() if task.published}
"""Published figures of both models by task and measure: zero-, one- and few-shot."""


class AnswerFile:
    """File with one JSON object per line: the setup, then each answer as soon as it is known."""

    def __init__(self, path: Path, setup: Mapping[str, Any]) -> None:
        """Create a file, or continue one; `setup`: all that the answers depend on, as JSON values.

        Raises UserError if the file has another setup, naming the differences, or cannot be written.
        """
        self.path = path
        self.answers: dict[str, dict[str, Answer]] = {}
        """Answers by task and id."""
        lines = read_text(path).splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                value = parse_json(line)
            except ValueError as error:
                if number == len(lines):
                    break  # a killed process may have left half a line
                raise UserError(f"{path}, line {number}: not JSON ({error}); delete the file") from error
            if number == 1 and isinstance(value, dict) and isinstance(value.get("setup"), dict):
                _require_same(path, value["setup"], setup)
            elif number == 1 or not _is_answer(value):
                raise UserError(f"{path}, line {number}: not written by this version; choose another --output")
            else:
                self._keep(value["task"], [Answer(value["id"], value["response"], value["figures"])])
        records = [_record(task, answer) for task, answers in self.answers.items() for answer in answers.values()]
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(map(_line, [{"setup": setup}, *records])).encode())

    def add(self, task: str, answers: Sequence[Answer]) -> None:
        """Append answers. Raises UserError if the disk is full."""
        self._keep(task, answers)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(_line(_record(task, answer)) for answer in answers)

    def _keep(self, task: str, answers: Sequence[Answer]) -> None:
        self.answers.setdefault(task, {}).update({answer.id: answer for answer in answers})


def _record(task: str, answer: Answer) -> dict[str, Any]:
    return {"task": task, **asdict(answer)}


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _is_answer(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"task", "id", "response", "figures"}:
        return False
    figures, response = value["figures"], value["response"]
    texts = isinstance(value["task"], str) and isinstance(value["id"], str) and isinstance(response, str | None)
    return texts and isinstance(figures, dict) and all(isinstance(figure, int | float) for figure in figures.values())


def _require_same(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    different = ", ".join(
        f"{key}: {saved.get(key)} in the file, {current.get(key)} now"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    )
    if different:
        raise UserError(f"{path} has answers for other options ({different}); choose another --output or delete it")


def result(task: str, shots: int, questions: int, measures: Mapping[str, float]) -> dict[str, Any]:
    """Return a task's figures, and those of both models in the paper (few-shot for several shots), as JSON values."""
    settings = {name: columns[min(shots, 2)] for name, columns in PUBLISHED.get(task, {}).items() if name in measures}
    pairs = {name: pair for name, pair in settings.items() if pair is not None}
    published = {model: {name: pair[i] for name, pair in pairs.items()} for i, model in enumerate(MODELS)}
    return {"task": task, "shots": shots, "questions": questions, "measures": dict(measures), "published": published}


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each measure of each task; published figures are few-shot where shots > 1."""
    rows = Table("task", "shots", "questions", "measure")
    for title in ("this model", *MODELS):
        rows.add_column(title, justify="right")
    for entry in results:
        for name, value in entry["measures"].items():
            figures = [value, *(entry["published"][model].get(name) for model in MODELS)]
            texts = ["" if one is None else figure(one) for one in figures]
            rows.add_row(entry["task"], str(entry["shots"]), str(entry["questions"]), name, *texts)
    return rows
