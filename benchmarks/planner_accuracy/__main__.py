"""Compares the planner's cost model with published measurements of training steps: how far off are its times and its
memory, in which order does it put layouts, how much slower is the one it picks.

Without --fit the shipped coefficients are used (benchmarks/results/planner_fit.json); with it those of the named
sources are fitted anew, and each of their rows is predicted by coefficients that were fitted without it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.planner_accuracy.accuracy import (
    LEAST_ROWS,
    Coefficients,
    Fitted,
    Prediction,
    Scope,
    cluster_of,
    cross_validated,
    fit_rows,
    pooled,
    predict_rows,
    summarise,
)
from benchmarks.planner_accuracy.measurements import Row, load_clusters, read_rows
from pangu.config.cluster import ClusterConfig
from pangu.config.errors import UserError
from pangu.config.exit_status import exit_status

_ROOT = Path(__file__).resolve().parents[2]
_SHIPPED = _ROOT / "benchmarks" / "results" / "planner_fit.json"
_EXAMPLE = """example:
  python -m benchmarks.planner_accuracy --table measurements.csv
  python -m benchmarks.planner_accuracy --table measurements.csv --fit vTrain,dgxc --json
  python -m benchmarks.planner_accuracy --table measurements.csv --fit all --write planner_fit.json --markdown

A table has a row for each measurement, with columns source, gpu, gpus, layers, hidden, heads, vocab, seq, tp, pp,
global_batch and more; rows that lack what is needed are counted and left out.
"""
_HEADS = ("source", "rows", "mean", "median", "worst", "memory", "tau", "pick", "out of memory")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_accuracy",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--table", required=True, type=Path, metavar="FILE.csv", help="measurements")
    parser.add_argument(
        "--fit", metavar="SOURCES", help="words of the names of sources to fit, separated by commas; all: every source"
    )
    parser.add_argument("--write", type=Path, metavar="FILE.json", help="write the fitted coefficients (with --fit)")
    parser.add_argument(
        "--coefficients", type=Path, default=_SHIPPED, metavar="FILE.json", help="instead of the shipped"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print data instead of a table")
    form.add_argument("--markdown", action="store_true", help="print a table of a page of the docs")
    return parser.parse_args(arguments)


def validate(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError."""
    rows, skipped = read_rows(options.table)
    clusters = load_clusters(_ROOT / "configs" / "cluster")
    usable = [row for row in rows if cluster_of(row, clusters) is not None]
    skipped.update(f"no file of configs/cluster for {row.device}" for row in rows if row.family.lower() not in clusters)
    if not usable:
        raise UserError(f"{options.table}: no row can be used: {_words(skipped) or 'there is none'}")
    scopes: dict[Scope, list[Row]] = defaultdict(list)
    for row in usable:
        scopes[Scope.of(row)].append(row)
    if options.write is not None and options.fit is None:
        raise UserError("--write needs --fit: there is nothing new to write; --fit all works")
    predictions = (
        predict_rows(usable, clusters, read_coefficients(options.coefficients))
        if options.fit is None
        else _fitted(options, scopes, clusters)
    )
    report = summary(predictions, skipped)
    if options.json:
        print(json.dumps(report, indent=2))
    elif options.markdown:
        print(markdown(report))
    else:
        _print(report)


def _fitted(
    options: argparse.Namespace, scopes: Mapping[Scope, list[Row]], clusters: Mapping[str, ClusterConfig]
) -> list[Prediction]:
    """Predictions of all rows with coefficients of the named sources, theirs by cross-validation."""
    words = [word.strip().lower() for word in options.fit.split(",") if word.strip()]
    chosen = {
        scope: rows
        for scope, rows in scopes.items()
        if words == ["all"] or any(word in f"{scope.source} {scope.device}".lower() for word in words)
    }
    if not chosen:
        names = "; ".join(sorted({scope.source for scope in scopes}))
        raise UserError(f"--fit {options.fit}: names no source of {options.table}; there are: {names}")
    pools = pooled(chosen, clusters)
    if options.write is not None:
        enough = {scope: rows for scope, rows in chosen.items() if len(rows) >= LEAST_ROWS}
        fits = [Coefficients(scope, "", fit_rows(rows, clusters), len(rows)) for scope, rows in enough.items()]
        write_coefficients(options.write, fits + pools, options.table)
    predictions: list[Prediction] = []
    for scope, rows in scopes.items():
        if scope in chosen and len(rows) >= LEAST_ROWS:
            predictions += cross_validated(rows, clusters)
        elif scope in chosen:
            others = {one: its_rows for one, its_rows in chosen.items() if one.source != scope.source}
            predictions += predict_rows(rows, clusters, pooled(_alike(others, rows[0]), clusters))
        else:
            predictions += predict_rows(rows, clusters, pools)
    return predictions


def _alike(scopes: Mapping[Scope, list[Row]], row: Row) -> dict[Scope, list[Row]]:
    """Those of the same kind of device and format."""
    kind = row.family, row.format
    return {scope: rows for scope, rows in scopes.items() if (rows[0].family, rows[0].format) == kind}


def read_coefficients(path: Path) -> list[Coefficients]:
    """The coefficients of a file. Raises UserError if it is none."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["fits"]
        return [
            Coefficients(
                Scope(one["source"], one["device"], one["format"]),
                one["program"],
                Fitted(*(_factors(one[part.name]) for part in fields(Fitted))),
                int(one["rows"]),
            )
            for one in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as fitted coefficients: {error!r}") from error


def _factors(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def write_coefficients(path: Path, fits: Sequence[Coefficients], table: Path) -> None:
    """Write coefficients with how they were fitted. Raises UserError if the file cannot be written."""
    command = f"python -m benchmarks.planner_accuracy --table {table.name} --fit all --write {path.name}"
    entries = [
        {
            **one.scope._asdict(),
            "program": one.program,
            "rows": one.rows,
            **{
                name: {key: float(f"{value:.4g}") for key, value in factors.items()}
                for name, factors in asdict(one.fitted).items()
            },
        }
        for one in fits
    ]
    how = "factors over the figures of configs/cluster; Huber loss, at most 150 rows a source; * stands for all others"
    try:
        path.write_text(
            json.dumps({"made_by": command, "how": how, "fits": entries}, indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error


def summary(predictions: Sequence[Prediction], skipped: Counter[str]) -> dict[str, Any]:
    """Errors by source, and by table where a source has several kinds of devices."""
    by_source: dict[str, list[Prediction]] = defaultdict(list)
    by_scope: dict[Scope, list[Prediction]] = defaultdict(list)
    for one in predictions:
        by_source[one.row.source].append(one)
        by_scope[Scope.of(one.row)].append(one)
    several = Counter(scope.source for scope in by_scope)
    return {
        "sources": {source: summarise(group) for source, group in by_source.items()},
        "devices": {
            f"{scope.source}, {scope.device} {scope.format}": summarise(group)
            for scope, group in by_scope.items()
            if several[scope.source] > 1
        },
        "all": summarise(predictions),
        "skipped": dict(skipped),
    }


def _lines(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table."""
    lines = []
    for name, numbers in {**report["sources"], **report["devices"], "all": report["all"]}.items():
        foreseen = f"{numbers['out_of_memory_told']} of {numbers['out_of_memory_rows']}"
        lines.append(
            (
                name,
                str(numbers["rows"]),
                *(
                    _percent(numbers[f"{key}_error"])
                    for key in ("time_mean", "time_median", "time_worst", "memory_mean")
                ),
                "" if numbers["tau"] is None else f"{numbers['tau']:.2f}",
                _percent(numbers["pick_slowdown"]),
                foreseen if numbers["out_of_memory_rows"] else "",
            )
        )
    return lines


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _words(skipped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} because {reason}" for reason, count in sorted(skipped.items()))


def _print(report: Mapping[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(*_HEADS, box=None, header_style="italic", pad_edge=False)
    for line in _lines(report):
        table.add_row(*line)
    console.print(table)
    if report["skipped"]:
        console.print(f"left out: {_words(report['skipped'])}", markup=False, highlight=False)


def markdown(report: Mapping[str, Any]) -> str:
    """The same as a table of a page."""
    lines = [_HEADS, tuple("---" if number == 0 else "---:" for number in range(len(_HEADS))), *_lines(report)]
    rows = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
    return f"{rows}\n\nLeft out: {_words(report['skipped']) or 'nothing'}."


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: validate(parse(arguments)), "\nerror")


if __name__ == "__main__":
    sys.exit(main())
