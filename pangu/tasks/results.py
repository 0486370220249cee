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
from pangu.tasks.ask import Answer
from pangu.tasks.task import read_text

MODELS = ("PanGu-α 2.6B", "PanGu-α 13B")

_Pair = tuple[float, float]
"""Figures of the two models."""
_Settings = tuple[_Pair | None, _Pair | None, _Pair | None]
"""Zero-, one- and few-shot figures."""

PUBLISHED: Mapping[str, Mapping[str, _Settings]] = {
    "cmrc2018": {
        "exact_match": ((1.21, 1.46), (2.49, 3.76), (5.68, 9.76)),
        "f1": ((16.65, 19.28), (18.57, 21.46), (23.22, 29.23)),
    },
    "drcd": {
        "exact_match": ((0.8, 0.66), (2.47, 4.22), (5.31, 9.09)),
        "f1": ((9.99, 10.55), (12.48, 15.01), (18.29, 23.46)),
    },
    "dureader": {"rouge_1": ((21.07, 24.46), (20.18, 25.99), (21.43, 27.67))},
    "webqa": {
        "exact_match": ((4.43, 5.13), (10.22, 13.43), (23.71, 31.18)),
        "f1": ((13.71, 14.47), (20.56, 24.52), (33.81, 41.21)),
    },
    "pd": {"accuracy": ((38.47, 43.86), (38.8, 40.97), (39.07, 41.13))},
    "cft": {"accuracy": ((42.39, 46.60), (41.61, 45.42), (42.05, 45.86))},
    "cmrc2017": {"accuracy": ((37.83, 38.90), (38.00, 38.40), (36.33, 37.86))},
    "chid": {"accuracy": ((68.73, 70.64), (68.16, 70.05), (66.56, 70.91))},
    "cmrc2019": {"accuracy": ((68.22, 70.54), (68.05, 70.02), (66.26, 71.28))},
    "cmnli": {"accuracy": ((50.20, 48.44), (49.54, 46.81), (51.17, 46.18))},
    "ocnli": {"accuracy": ((42.61, 41.53), (44.00, 44.10), (46.78, 46.44))},
    "tnews": {"accuracy": ((60.95, 60.26), (57.95, 63.83), (63.62, 65.17))},
    "iflytek": {"accuracy": ((74.26, 73.80), (79.03, 78.95), (80.15, 80.34))},
    "afqmc": {"accuracy": ((59.29, 65.76), (64.62, 63.55), (69.00, 68.91))},
    "csl": {"accuracy": ((50.50, 49.30), (50.90, 50.20), (52.00, 55.70))},
    "cluewsc2020": {"accuracy": ((73.36, 75.00), (75.33, 75.00), (72.70, 78.62))},
    "c3": {"accuracy": ((53.42, 54.47), (52.82, 53.92), (53.64, 54.58))},
    "wplc": {"perplexity": ((16.70, 19.18), None, None)},
}
"""Published settings by task and measure. Everything but perplexity is in percent."""


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
                raise UserError(f"{path}, line {number}: was not written by this command; choose another --output")
            else:
                self._keep(value["task"], [Answer(value["id"], value["said"], value["figures"])])
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
    if not isinstance(value, dict) or value.keys() != {"task", "id", "said", "figures"}:
        return False
    texts = isinstance(value["task"], str) and isinstance(value["id"], str) and isinstance(value["said"], str | None)
    figures = value["figures"]
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
    settings = {name: of_shots[min(shots, 2)] for name, of_shots in PUBLISHED.get(task, {}).items() if name in measures}
    pairs = {name: pair for name, pair in settings.items() if pair is not None}
    of_models = {model: {name: pair[i] for name, pair in pairs.items()} for i, model in enumerate(MODELS)}
    return {"task": task, "shots": shots, "questions": questions, "measures": dict(measures), "published": of_models}


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each measure of each task; published figures are few-shot where shots > 1."""
    rows = Table("task", "shots", "questions", "measure")
    for title in ("this model", *MODELS):
        rows.add_column(title, justify="right")
    for entry in results:
        for name, value in entry["measures"].items():
            figures = [value, *(entry["published"][model].get(name) for model in MODELS)]
            texts = ["" if figure is None else f"{figure:.2f}" for figure in figures]
            rows.add_row(entry["task"], str(entry["shots"]), str(entry["questions"]), name, *texts)
    return rows
