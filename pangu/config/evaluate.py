"""The configuration of benchmarks during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pangu.config.bounds import Count, Filename, Natural
from pangu.config.data import DataConfig, IndexedData, SyntheticData
from pangu.config.errors import Problem

TaskName = Literal[
    "afqmc",
    "cmnli",
    "ocnli",
    "tnews",
    "iflytek",
    "csl",
    "cluewsc2020",
    "chid",
    "cmrc2019",
    "c3",
    "cmrc2018",
    "drcd",
    "dureader",
    "webqa",
    "pd",
    "cft",
    "cmrc2017",
    "wplc",
    "lambada",
    "wikitext",
]
"""The tasks of `evaluation.tasks.catalogue`."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Benchmarks during training; the same tasks as those of scripts/evaluate.py."""

    every: Natural
    """Steps between evaluations, which also happen at the end; 0: none."""
    tasks: tuple[TaskName, ...]
    """Names of tasks, e.g. [afqmc, lambada]."""
    data: Filename | None
    """Folder with one folder of the benchmark's own files for each task, e.g. DATA/afqmc/dev.json."""
    shots: Natural
    """Examples before each question."""
    limit: Count | None
    """Questions of each task, the same ones every time; null: all."""


def contradictions(evaluate: EvaluateConfig, data: DataConfig) -> Iterator[Problem]:
    """What is wrong with these keys, for a run on some data."""
    if evaluate.every == 0:
        return
    off = "evaluate.every=0 works"
    if not evaluate.tasks:
        yield Problem("evaluate.tasks", "[]", "names no task", f"{off}, or e.g. [lambada]")
    if evaluate.data is None:
        yield Problem("evaluate.data", None, "must be the folder of the tasks' files", off)
    if isinstance(data, SyntheticData) or (isinstance(data, IndexedData) and data.tokenizer is None):
        works = off if isinstance(data, SyntheticData) else f"{off}, or give data.tokenizer"
        yield Problem("evaluate.every", evaluate.every, f"data.kind = {data.kind} has no tokenizer here", works)
