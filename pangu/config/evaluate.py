"""The configuration of benchmarks during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pangu.config.data import DataConfig, IndexedData, SyntheticData
from pangu.config.errors import Problem


@dataclass(frozen=True)
class EvaluateConfig:
    """Benchmarks during training; the same tasks as those of scripts/evaluate.py."""

    every: int
    """Steps between evaluations, which also happen at the end; 0: none."""
    tasks: tuple[str, ...]
    """Names of tasks, e.g. [afqmc, lambada]."""
    data: str | None
    """Folder with one folder of the benchmark's own files for each task, e.g. DATA/afqmc/dev.json."""
    shots: int
    """Examples before each question."""
    limit: int | None
    """Questions of each task, the same ones every time; null: all."""


def contradictions(evaluate: EvaluateConfig, data: DataConfig) -> Iterator[Problem]:
    """What is wrong with these keys, for a run on some data."""
    lowest = {"every": 0, "shots": 0, "limit": 1}
    for key, low in lowest.items():
        value = getattr(evaluate, key)
        if value is not None and value < low:
            yield Problem(f"evaluate.{key}", value, f"must be at least {low}")
    if evaluate.every <= 0:
        return
    off = "evaluate.every=0 works"
    if not evaluate.tasks:
        yield Problem("evaluate.tasks", "[]", "names no task", f"{off}, or e.g. [lambada]")
    if evaluate.data is None:
        yield Problem("evaluate.data", "null", "must be the folder of the tasks' files", off)
    if isinstance(data, SyntheticData) or (isinstance(data, IndexedData) and data.tokenizer is None):
        works = off if isinstance(data, SyntheticData) else f"{off}, or give data.tokenizer"
        yield Problem("evaluate.every", evaluate.every, f"data.kind = {data.kind} has no tokenizer here", works)
