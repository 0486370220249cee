"""Compares the planner's cost model with published measurements of training steps: how far off are its times and its
memory, in which order does it put layouts, how much slower is the one it picks.

Without --fit the shipped coefficients are used (benchmarks/results/planner_fit.json); with it those of the named
sources are fitted anew, and each of their rows is predicted by coefficients that were fitted without it. With
--held-out each source is predicted by what all other sources tell of its devices, as one that was never seen is."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
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
from benchmarks.planner_accuracy.intervals import coverage, intervals_of, residuals_of
from benchmarks.planner_accuracy.measurements import Row, Scope, grouped, kind_of, load_clusters, read_rows
from pangu.common.errors import UserError
from pangu.common.exit_status import exit_status
from pangu.report.intervals import SHARE

_ROOT = Path(__file__).resolve().parents[2]
_SHIPPED = _ROOT / "benchmarks" / "results" / "planner_fit.json"
_EXAMPLE = """example:
  python -m benchmarks.planner_accuracy --table measurements.csv
  python -m benchmarks.planner_accuracy --table measurements.csv --held-out
  python -m benchmarks.planner_accuracy --table measurements.csv --fit vTrain,dgxc --json
  python -m benchmarks.planner_accuracy --table measurements.csv --fit all --write planner_fit.json

A table has a row for each measurement, with columns source, gpu, gpus, layers, hidden, heads, vocab, seq, tp, pp,
global_batch and more; rows that lack what is needed are counted and left out.
"""
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
    fitted = parser.add_mutually_exclusive_group()
    fitted.add_argument("--fit", metavar="SOURCES", help="words of sources' names, separated by commas, or all")
    fitted.add_argument("--held-out", action="store_true", help="leave out one source after the other")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.json", help="write coefficients (with --fit) or intervals (--held-out)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table in Markdown")
    return parser.parse_args(arguments)


def validate(options: argparse.Namespace) -> None:
    """Print the accuracy of predictions. Raises UserError."""
    rows, skipped = read_rows(options.table, load_clusters(_ROOT / "configs" / "cluster"))
    if not rows:
        raise UserError(f"{options.table}: no row can be used: {_join(skipped) or 'there is none'}")
    if options.write is not None and options.fit is None and not options.held_out:
        raise UserError("--write needs --fit or --held-out: there is nothing new to write; --fit all works")
    if options.fit is None and not options.held_out:
        predictions = predict_rows(rows, [Fitted(**one) for one in json.loads(_SHIPPED.read_text("utf-8"))["fits"]])
    else:
        predictions = _fit_and_predict(options, rows)
    report = {**summary(predictions, options.held_out), "skipped": dict(skipped)}
    if options.held_out:
        residuals = list(residuals_of(rows))
        report["coverage"] = coverage(residuals)
        if options.write is not None:
            if not residuals:
                raise UserError(f"{options.table}: no row has a step time, from which intervals could be made")
            found = {name: one._asdict() for name, one in sorted(intervals_of(residuals).items())}
            how = f"{SHARE:.0%} of measured over predicted step times, by the bare figures of configs/cluster"
            _write(options, "--held-out", {"how": how, "intervals": found})
    print(json.dumps(report, indent=2) if options.json else markdown(report))


def _fit_and_predict(options: argparse.Namespace, rows: Sequence[Row]) -> list[Prediction]:
    """Predict all rows by named sources other than theirs; rows of named ones by cross-validation, unless held out."""
    scopes = grouped(rows, attrgetter("scope"))
    words = [word.strip() for word in (options.fit or "all").lower().split(",") if word.strip()]
    chosen = {
        scope: of_scope
        for scope, of_scope in scopes.items()
        if words == ["all"] or any(word in " ".join(scope[:2]).lower() for word in words)
    }
    if not chosen:
        names = "; ".join(sorted({source for source, *_ in scopes}))
        raise UserError(f"--fit {options.fit}: names no source of {options.table}; there are: {names}")
    least = math.inf if options.held_out else LEAST_ROWS
    large = {scope: of_scope for scope, of_scope in chosen.items() if len(of_scope) >= least}
    if options.write is not None and not options.held_out:
        fits = [fit_rows(of_scope, scope) for scope, of_scope in large.items()]
        how = "factors over the figures of configs/cluster; Huber loss, at most 150 rows a source;"
        found = [asdict(one) for one in fits + pooled(chosen)]
        _write(options, "--fit all", {"how": f"{how} * stands for all others", "fits": found})
    predicted = (cross_validated(scopes[one]) if one in large else _by_others(scopes[one], chosen) for one in scopes)
    return list(chain.from_iterable(predicted))


def _by_others(rows: Sequence[Row], scopes: Mapping[Scope, list[Row]]) -> list[Prediction]:
    """Predict the rows of a scope by the scopes of other sources."""
    source, kind = rows[0].source, kind_of(rows[0].scope)
    return predict_rows(rows, pooled({one: scopes[one] for one in scopes if one[0] != source and kind_of(one) == kind}))


def _write(options: argparse.Namespace, fitted: str, content: Mapping[str, Any]) -> None:
    """Write what was fitted, with how it was made, to four digits. Raises UserError if the file cannot be written."""
    command = (
        f"python -m benchmarks.planner_accuracy --table {options.table.name} {fitted} --write {options.write.name}"
    )
    exact = json.dumps({"made_by": command, **content})
    text = json.dumps(json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}")), indent=1)
    try:
        options.write.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{options.write}: cannot be written: {error}") from error


def summary(predictions: Sequence[Prediction], by_kind: bool = False) -> dict[str, Any]:
    """Return the errors by source, by kind of device where a source has several, and if `by_kind` by kind and format
    over all sources."""
    sources = grouped(predictions, lambda one: one.row.source)
    devices = grouped(predictions, lambda one: "{}, {} {}".format(*one.row.scope))
    kinds = grouped(predictions, lambda one: "all {} {}".format(*kind_of(one.row.scope)))
    several = {name: group for name, group in devices.items() if len(group) < len(sources[group[0].row.source])}
    return {
        "sources": {source: summarise(group) for source, group in sources.items()},
        "devices": {name: summarise(group) for name, group in several.items()},
        "kinds": {name: summarise(group) for name, group in kinds.items() if by_kind},
        "all": summarise(predictions),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a table in Markdown."""
    lines = [
        "| source | rows | mean | median | worst | memory | tau | pick | out of memory |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, numbers in {**report["sources"], **report["devices"], **report["kinds"], "all": report["all"]}.items():
        errors = [_format(numbers[key], ".1%") for key in _ERRORS]
        order = _format(numbers["tau"], ".2f"), _format(numbers["pick_slowdown"], ".1%")
        told, failed = numbers["out_of_memory_told"], numbers["out_of_memory_rows"]
        cells = name.replace("|", "/"), str(numbers["rows"]), *errors, *order, f"{told} of {failed}" if failed else ""
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Left out: {_join(report['skipped']) or 'nothing'}."]
    numbers = report["all"]
    lines.append(f"False alarms: {numbers['out_of_memory_false']} of {numbers['rows']} that ran are called too large.")
    if counts := report.get("coverage"):
        inside, rows = map(sum, zip(*counts.values(), strict=True))
        mean = fmean(one / of_source for one, of_source in counts.values())
        lines.append(
            f"Intervals from other sources contain {inside} of {rows} rows, {mean:.0%} in the mean over sources:"
        )
        lines += [f"- {source}: {one} of {of_source}" for source, (one, of_source) in counts.items()]
    return "\n".join(lines)


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _join(skipped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} because {reason}" for reason, count in sorted(skipped.items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: validate(parse(arguments)), "\nerror")


if __name__ == "__main__":
    sys.exit(main())
