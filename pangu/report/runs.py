"""Run folders read without trust: values are checked, and no link is followed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pangu.common.errors import UserError, reading, shown
from pangu.common.files import open_regular, read_json, refuse_links
from pangu.common.flat import flatten
from pangu.config.build import with_new_names
from pangu.metrics.columns import Series, columns_of, smooth
from pangu.metrics.record import read_records
from pangu.metrics.text import compact, duration

MOST_RUNS = 100
"""Largest number of runs in a report."""
MOST_CONFIG_BYTES = 2**20
MOST_SOURCES = 50
"""Largest number of validation sources of a run."""
DEPTH = 3
"""Nesting depth of folders that hold a sweep."""
SILENT_SECONDS = 120.0
"""Seconds without a heartbeat after which a run that has not ended counts as silent."""
_NUMBERS = (
    *("step", "tokens", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu"),
    *("peak_memory_gib", "skipped", "loss_scale", "data_wait_s", "validation_loss", "continued_from"),
    *("failed_saves", "failed_uploads", "rollbacks", "goodput"),
)
"""Fields of metrics.jsonl that are drawn or counted."""
_EXPERTS = ("load", "least_load", "dropped", "balance_loss", "z_loss")


@dataclass(frozen=True)
class Run:
    """Contents of a run folder."""

    name: str
    config: Mapping[str, Any]
    """Values by dotted key."""
    records: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl."""
    summary: Mapping[str, Any]
    """Summary; empty until the run is complete."""
    heartbeat: Mapping[str, Any]
    silent_s: float
    """Seconds since the last heartbeat."""
    stacks: int
    """Number of files with stacks of hanging ranks."""
    replicas: int
    """Data-parallel size at the last start, whatever the configuration says; 0: unknown."""

    @cached_property
    def columns(self) -> dict[str, Series]:
        """Figures of all steps by name, NaN where missing; those of experts as `experts/load`."""
        experts = [part if isinstance(part := record.get("experts"), dict) else {} for record in self.records]
        expert_columns = columns_of(experts, _EXPERTS)
        columns = columns_of(self.records, _NUMBERS) | {f"experts/{name}": expert_columns[name] for name in _EXPERTS}
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            columns["data_wait"] = columns["data_wait_s"] / columns["step_time_s"]
        return columns

    @cached_property
    def sources(self) -> dict[str, Series]:
        """Losses on the sources of the validation split, if it has several, like `columns`."""
        steps = [part if isinstance(part := record.get("validation_sources"), dict) else {} for record in self.records]
        names = list(dict.fromkeys(name for part in steps for name in part))[:MOST_SOURCES]
        figures = {name: [one if isinstance(one := part.get(name), dict) else {} for part in steps] for name in names}
        losses = {name: columns_of(history, ("loss",))["loss"] for name, history in figures.items()}
        return {name: history for name, history in losses.items() if math.isfinite(last(history))}

    @property
    def state(self) -> str:
        """Current activity of the run, or how it ended."""
        doing = self.heartbeat.get("doing")
        if self.summary or doing == "failed":
            return "complete" if self.summary and doing != "failed" else "failed"
        if doing == "ended":
            return "stopped"
        if not isinstance(doing, str):
            return "unknown"
        return doing if self.silent_s < SILENT_SECONDS else f"silent for {duration(self.silent_s)}"

    @property
    def layout(self) -> str:
        """Parallel sizes other than 1, and the ZeRO stage."""
        values = {**self.config, "parallel.data": self.replicas or self.config.get("parallel.data")}
        degrees = [
            f"{name} {value}"
            for name in ("tensor", "pipeline", "data", "context", "expert", "virtual_stages")
            if isinstance(value := values.get(f"parallel.{name}"), int) and value > 1
        ]
        if self.config.get("parallel.pipeline") not in (None, 1):
            degrees.append(str(self.config.get("parallel.schedule")))
        degrees += ["sequence"] if self.config.get("parallel.sequence") is True else []
        zero = self.config.get("parallel.zero")
        return ", ".join([*degrees, f"ZeRO {zero}"] if zero else degrees or ["one replica"])

    def last(self, name: str) -> float:
        """Return the newest finite figure of a column; NaN without any."""
        return last(self.columns[name])

    def median(self, name: str) -> float:
        """Return the median over all steps but the first ten (warm-up), if there are more."""
        values = self.columns[name]
        values = values[10:] if len(values) > 20 else values
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else math.nan

    @property
    def final_loss(self) -> float:
        """Training loss, smoothed over a fiftieth of the run."""
        return last(smooth(self.columns["loss"]))

    def events(self) -> Iterator[tuple[int, str]]:
        """Yield the steps with faults or restarts, each with a description."""
        before, failed = 0.0, 0.0
        names = ("step", "skipped", "continued_from", "failed_saves")
        columns = [self.columns[name] for name in names]
        columns[0] = np.nan_to_num(columns[0])
        for step, skipped, place, saves, record in zip(*columns, self.records, strict=True):
            if math.isfinite(place):
                yield int(step), f"continues from the checkpoint of step {place:.0f}" if place else "starts again"
            if saves > failed:
                yield int(step), f"saving failed {saves:.0f} times in a row"
            failed = saves if math.isfinite(saves) else 0.0
            if skipped > before:
                yield int(step), "skipped: the gradients were not finite"
            before = max(before, skipped if math.isfinite(skipped) else 0.0)
            slow = record.get("slow_ranks")
            if isinstance(slow, dict) and slow:
                ranks = ", ".join(f"{shown(rank)} ({shown(factor)[:4]}x)" for rank, factor in list(slow.items())[:5])
                yield int(step), f"slow ranks: {ranks}"
        if self.state == "failed" or self.state.startswith("silent"):
            yield int(number(self.heartbeat.get("step")) or 0), f"the run {self.state}"
        if self.stacks:
            yield (
                int(self.last("step") if len(self.records) else 0),
                f"stacks/ has {self.stacks} stack traces of stuck ranks",
            )


def last(values: Series) -> float:
    """Return the newest finite value; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**63 and math.isfinite(value) else None


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return (folder / "config.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among `paths` and in them, e.g. a sweep's. Raises UserError if one holds none."""
    folders: list[Path] = []
    for path in paths:
        with reading(path):
            inside = [path] if is_run(path) else sorted(_below(path, DEPTH), key=_natural)
        if not inside:
            raise UserError(f"{path}: is not a run folder (metrics.jsonl and config.yaml) and contains none")
        folders += [folder for folder in inside if folder not in folders]
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs are too many for one page; name at most {MOST_RUNS}")
    return folders


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for inner in folder.iterdir():
        if inner.is_symlink() or not inner.is_dir():
            continue
        if is_run(inner):
            yield inner
        elif depth > 1:
            yield from _below(inner, depth - 1)


def _natural(path: Path) -> tuple[Path, float, str]:
    """Return a sort key that puts a sweep's folder 2 before 10."""
    return path.parent, float(path.name) if path.name.isdecimal() and len(path.name) < 9 else math.inf, path.name


def open_run(folder: Path, name: str) -> Run:
    """Read a run folder. Raises UserError for files that cannot be read."""
    names = ("config.yaml", "metrics.jsonl", "summary.json", "heartbeat.json", "nodes.json", "stacks")
    refuse_links(folder / file for file in names)
    metrics, stacks = folder / "metrics.jsonl", folder / "stacks"
    with reading(metrics):
        records = read_records(metrics)
    with reading(folder):
        beat = folder / "heartbeat.json"
        silent_s = time.time() - beat.stat().st_mtime if beat.exists() else 0.0
        traces = sum(1 for _ in stacks.iterdir()) if stacks.is_dir() else 0
    summary, heartbeat = (_value(folder / f"{file}.json", {}) for file in ("summary", "heartbeat"))
    places = [rank.get("data") for rank in _value(folder / "nodes.json", []) if isinstance(rank, dict)]
    replicas = 1 + max((place for place in places if isinstance(place, int)), default=-1)
    return Run(name, _config(folder), records, summary, heartbeat, silent_s, traces, replicas)


def _value(path: Path, empty: Any) -> Any:
    """Return the value in a JSON file, or `empty`, whose type it must have, if there is no file."""
    value = read_json(path, shared=True) if path.exists() else empty
    if type(value) is not type(empty):
        raise UserError(f"{path}: is not a JSON {'object' if empty == {} else 'array'}")
    return value


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    with reading(path, ValueError, yaml.YAMLError, RecursionError, rule="is not a configuration"):
        with open_regular(path, "rb") as file:
            content = file.read(MOST_CONFIG_BYTES + 1)
        if len(content) > MOST_CONFIG_BYTES:
            raise ValueError("it has more than 1 MiB")
        values = yaml.safe_load(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping of keys")
        return flatten(with_new_names(values))


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the values of each key that differs between runs, `-` where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [shown(run.config[key]) if key in run.config else "-" for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if key != "train.output" and len(set(values)) > 1}


def figures(run: Run) -> dict[str, tuple[str, float]]:
    """Return the final figures: name, text and a number that is better if smaller (NaN: not compared)."""
    loss, held_out, rate = run.final_loss, run.last("validation_loss"), run.median("tokens_per_s")
    steps = run.config.get("train.steps")
    parameters = number(run.summary.get("parameters"))
    done = f"{run.last('step'):,.0f}" if len(run.records) else "0"
    restarts = int(np.isfinite(run.columns["continued_from"]).sum())
    mfu, memory, wait = run.median("mfu"), run.last("peak_memory_gib"), run.median("data_wait")
    return {
        "state": (run.state, math.nan),
        "loss": (_text(loss, "{:.4f}".format), loss),
        "validation": (_text(held_out, "{:.4f}".format), held_out),
        "perplexity": (_text(held_out, lambda value: f"{math.exp(min(value, 700)):.4g}"), math.nan),
        "tokens/s": (_text(rate, compact), -rate),
        "MFU": (_text(mfu, "{:.1%}".format), -mfu),
        "goodput": (_text(run.last("goodput"), "{:.1%}".format), math.nan),
        "step": (f"{done} / {steps:,}" if isinstance(steps, int) else done, math.nan),
        "tokens": (_text(run.last("tokens"), compact), math.nan),
        "weights": ("-" if parameters is None else compact(parameters), math.nan),
        "layout": (run.layout, math.nan),
        "TFLOP/s per device": (_text(run.median("tflops_per_device"), "{:.4g}".format), math.nan),
        "memory": (_text(memory, "{:.2f} GiB".format), memory),
        "data wait": (_text(wait, "{:.1%}".format), math.nan),
        "skipped": (_text(run.last("skipped"), "{:.0f}".format), math.nan),
        "restarts": (str(restarts), math.nan),
        "failed saves": (f"{_rises(run.columns['failed_saves'])}", math.nan),
        "failed uploads": (f"{_rises(run.columns['failed_uploads'])}", math.nan),
        "rollbacks": (f"{np.nan_to_num(run.columns['rollbacks']).max(initial=0):.0f}", math.nan),
        "time": (_text(float(np.nansum(run.columns["step_time_s"])), duration), math.nan),
    }


def _rises(values: Series) -> int:
    """Return how often a count that starts again from 0 went up."""
    return int((np.diff(np.nan_to_num(values), prepend=0) > 0).sum())


def _text(value: float, form: Any) -> str:
    return form(value) if math.isfinite(value) and abs(value) < 1e30 else "-"
