"""Compares the planner's cost model with published measurements of training steps: how far off are its times and its
memory, in which order does it put layouts, how much slower is the one it picks.

Without --fit the shipped coefficients are used (benchmarks/results/planner_fit.json); with it those of the named
sources are fitted anew, and each of their rows is predicted by coefficients that were fitted without it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planner_accuracy.accuracy import (
    LEAST_ROWS,
    Fitted,
    Prediction,
    cross_validated,
    fit_rows,
    pooled,
    predict_rows,
    summarise,
)
from benchmarks.planner_accuracy.measurements import Row, Scope, kind_of, load_clusters, read_rows
from pangu.common.errors import UserError
from pangu.common.exit_status import exit_status

_ROOT = Path(__file__).resolve().parents[2]
_SHIPPED = _ROOT / "benchmarks" / "results" / "planner_fit.json"
_EXAMPLE = """example:
  python -m benchmarks.planner_accuracy --table measurements.csv
  python -m benchmarks.planner_accuracy --table measurements.csv --fit vTrain,dgxc --json
  python -m benchmarks.planner_accuracy --table measurements.csv --fit all --write planner_fit.json

A table has a row for each measurement, with columns source, gpu, gpus, layers, hidden, heads, vocab, seq, tp, pp,
global_batch and more; rows that lack what is needed are counted and left out.
"""
_FACTORS = ("times", "memory", "shapes", "stalls")
_ERRORS = ("time_mean_error", "time_median_error", "time_worst_error", "memory_mean_error")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_accuracy",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", required=True, type=Path, metavar="FILE.csv", help="measurements")
    parser.add_argument("--fit", metavar="SOURCES", help="words of sources' names, separated by commas, or all")
    parser.add_argument("--write", type=Path, metavar="FILE.json", help="write the fitted coefficients (with --fit)")
    parser.add_argument("--coefficients", type=Path, default=_SHIPPED, metavar="FILE.json", help="default: shipped")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table in Markdown")
    return parser.parse_args(arguments)


def validate(options: argparse.Namespace) -> None:
    """Print the accuracy of predictions. Raises UserError."""
    rows, skipped = read_rows(options.table, load_clusters(_ROOT / "configs" / "cluster"))
    if not rows:
        raise UserError(f"{options.table}: no row can be used: {_join(skipped) or 'there is none'}")
    if options.write is not None and options.fit is None:
        raise UserError("--write needs --fit: there is nothing new to write; --fit all works")
    if options.fit is None:
        predictions = predict_rows(rows, read_coefficients(options.coefficients))
    else:
        predictions = _fit_and_predict(options, rows)
    report = {**summary(predictions), "skipped": dict(skipped)}
    print(json.dumps(report, indent=2) if options.json else markdown(report))


def _fit_and_predict(options: argparse.Namespace, rows: Sequence[Row]) -> list[Prediction]:
    """Predict all rows with coefficients of the named sources: theirs by cross-validation, or by other sources'."""
    scopes: dict[Scope, list[Row]] = defaultdict(list)
    for row in rows:
        scopes[row.scope].append(row)
    words = [word.strip().lower() for word in options.fit.split(",") if word.strip()]
    chosen = {
        scope: of_scope
        for scope, of_scope in scopes.items()
        if words == ["all"] or any(word in " ".join(scope[:2]).lower() for word in words)
    }
    if not chosen:
        names = "; ".join(sorted({source for source, *_ in scopes}))
        raise UserError(f"--fit {options.fit}: names no source of {options.table}; there are: {names}")
    large = {scope: of_scope for scope, of_scope in chosen.items() if len(of_scope) >= LEAST_ROWS}
    if options.write is not None:
        fits = [fit_rows(of_scope, scope) for scope, of_scope in large.items()]
        write_coefficients(options.write, fits + pooled(chosen), options.table)
    predictions: list[Prediction] = []
    for scope, of_scope in scopes.items():
        if scope in large:
            predictions += cross_validated(of_scope)
            continue
        others = {other: chosen[other] for other in chosen if other[0] != scope[0] and kind_of(other) == kind_of(scope)}
        predictions += predict_rows(of_scope, pooled(others))
    return predictions


def read_coefficients(path: Path) -> list[Fitted]:
    """Return the coefficients of a file. Raises UserError if it is none."""
    try:
        fits = []
        for one in json.loads(path.read_text(encoding="utf-8"))["fits"]:
            parts = ({name: float(factor) for name, factor in one[part].items()} for part in _FACTORS)
            fits.append(Fitted(one["source"], one["device"], one["format"], one["program"], int(one["rows"]), *parts))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as fitted coefficients: {error!r}") from error
    return fits


def write_coefficients(path: Path, fits: Sequence[Fitted], table: Path) -> None:
    """Write coefficients with how they were fitted. Raises UserError if the file cannot be written."""
    command = f"python -m benchmarks.planner_accuracy --table {table.name} --fit all --write {path.name}"
    how = "factors over the figures of configs/cluster; Huber loss, at most 150 rows a source; * stands for all others"
    exact = json.dumps({"made_by": command, "how": how, "fits": [asdict(one) for one in fits]})
    text = json.dumps(json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}")), indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors by source, and by kind of device where a source has several."""
    sources: dict[str, list[Prediction]] = defaultdict(list)
    devices: dict[str, list[Prediction]] = defaultdict(list)
    for one in predictions:
        sources[one.row.source].append(one)
        devices["{}, {} {}".format(*one.row.scope)].append(one)
    several = {name: group for name, group in devices.items() if len(group) < len(sources[group[0].row.source])}
    return {
        "sources": {source: summarise(group) for source, group in sources.items()},
        "devices": {name: summarise(group) for name, group in several.items()},
        "all": summarise(predictions),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a table in Markdown."""
    lines = [
        "| source | rows | mean | median | worst | memory | tau | pick | out of memory |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, numbers in {**report["sources"], **report["devices"], "all": report["all"]}.items():
        errors = [_format(numbers[key], ".1%") for key in _ERRORS]
        order = _format(numbers["tau"], ".2f"), _format(numbers["pick_slowdown"], ".1%")
        told, failed = numbers["out_of_memory_told"], numbers["out_of_memory_rows"]
        cells = name.replace("|", "/"), str(numbers["rows"]), *errors, *order, f"{told} of {failed}" if failed else ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nLeft out: {_join(report['skipped']) or 'nothing'}."


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _join(skipped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} because {reason}" for reason, count in sorted(skipped.items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: validate(parse(arguments)), "\nerror")


if __name__ == "__main__":
    sys.exit(main())
