"""Results: answers on disk as they come, so that a second start goes on, and figures beside the published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from pangu.config.errors import UserError, writing
from pangu.config.files import parse_json, write_atomically
from pangu.evaluation.tasks.ask import Answer
from pangu.evaluation.tasks.published import MODELS, published
from pangu.evaluation.tasks.readers import read_text


class AnswerFile:
    """One JSON object a line: the set-up, then each answer as soon as it is there."""

    def __init__(self, path: Path, setup: Mapping[str, Any]) -> None:
        """
        Args:
            path: begun if it does not exist, and continued if it does.
            setup: what the answers depend on, as JSON values.

        Raises:
            UserError: if the file is of another set-up, naming what differs, or cannot be written.
        """
        self.path = path
        self.answers: dict[str, dict[str, Answer]] = {}
        """Task -> id -> answer."""
        lines = self._whole_lines()
        if lines and (different := _different(lines[0].get("setup", {}), setup)):
            raise UserError(
                f"{path} holds answers of another set-up ({different}); choose another --output or delete it"
            )
        for number, line in enumerate(lines[1:], 2):
            self._keep(*self._answer(number, line))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # a killed process may have left half a line
            write_atomically(path, "".join(map(_line, [{"setup": setup}, *self._records()])).encode())

    def add(self, task: str, answers: Sequence[Answer]) -> None:
        """Append answers. Raises UserError if the disk is full."""
        self._keep(task, answers)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(_line({"task": task, **asdict(answer)}) for answer in answers)

    def _keep(self, task: str, answers: Sequence[Answer]) -> None:
        self.answers.setdefault(task, {}).update({answer.id: answer for answer in answers})

    def _records(self) -> list[dict[str, Any]]:
        found = [(task, answer) for task, answers in self.answers.items() for answer in answers.values()]
        return [{"task": task, **asdict(answer)} for task, answer in found]

    def _whole_lines(self) -> list[dict[str, Any]]:
        lines = read_text(self.path).splitlines() if self.path.exists() else []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                value = parse_json(line)
            except ValueError as error:
                if number < len(lines):
                    raise UserError(f"{self.path}, line {number}: not JSON ({error}); delete the file") from error
                continue
            if not isinstance(value, dict) or (number == 1 and not isinstance(value.get("setup"), dict)):
                raise UserError(f"{self.path}, line {number}: is no answer of this command; choose another --output")
            found.append(value)
        return found

    def _answer(self, number: int, line: dict[str, Any]) -> tuple[str, list[Answer]]:
        """The task and the answer of a line."""
        task, id_, said, figures = (line.get(name) for name in ("task", "id", "said", "figures"))
        texts = isinstance(task, str) and isinstance(id_, str) and isinstance(said, str | None)
        if not texts or not isinstance(figures, dict) or not all(isinstance(v, int | float) for v in figures.values()):
            raise UserError(f"{self.path}, line {number}: is no answer of this command; choose another --output")
        return str(task), [Answer(str(id_), said, figures)]


def result(task: str, shots: int, questions: int, measures: Mapping[str, float]) -> dict[str, Any]:
    """One task's figures beside the paper's, as JSON values."""
    theirs = {name: published(task, name, shots) for name in measures}
    return {
        "task": task,
        "shots": shots,
        "questions": questions,
        "measures": dict(measures),
        "published": {
            model: {name: pair[i] for name, pair in theirs.items() if pair is not None}
            for i, model in enumerate(MODELS)
        },
    }


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each measure of each task; published figures are those of the few-shot setting where shots > 1."""
    shown = Table("task", "shots", "questions", "measure")
    for title in ("this model", *MODELS):
        shown.add_column(title, justify="right")
    for found in results:
        for name, value in found["measures"].items():
            theirs = [found["published"][model].get(name) for model in MODELS]
            figures = [f"{value:.2f}", *("" if figure is None else f"{figure:.2f}" for figure in theirs)]
            shown.add_row(found["task"], str(found["shots"]), str(found["questions"]), name, *figures)
    return shown


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {before.get(key)} there, {now.get(key)} here"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    )
