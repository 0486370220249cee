"""Compares the planner's cost model with published measurements of training steps: how far off are its times and its
memory, in which order does it put layouts, how much slower is the one it picks.

Without --fit the shipped coefficients are used (benchmarks/results/planner_fit.json); with it those of the named
sources are fitted again, and each of their rows is predicted by coefficients that were fitted without it. With
--held-out each source is predicted by what all other sources tell of its devices, as one that was never seen is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planner_accuracy import accuracy
from benchmarks.planner_accuracy.intervals import coverage, intervals_of, residuals_of
from benchmarks.planner_accuracy.measurements import Row, grouped, kind_of, load_clusters, read_rows
from pangu.common.errors import UserError, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import read_json
from pangu.report.intervals import SHARE

_ROOT = Path(__file__).resolve().parents[2]
_SHIPPED = _ROOT / "benchmarks" / "results" / "planner_fit.json"
_PROGRAM = "python -m benchmarks.planner_accuracy"
_EXAMPLE = """example:
  python -m benchmarks.planner_accuracy --table measurements.csv
  python -m benchmarks.planner_accuracy --table measurements.csv --held-out
  python -m benchmarks.planner_accuracy --table measurements.csv --fit vTrain,dgxc --write planner_fit.json

A table has a row for each measurement, with columns source, gpu, gpus, layers, hidden, heads, vocab, seq, tp, pp,
global_batch and more; rows that lack what is needed are counted and left out.
"""
_FIGURES = ("time_mean_error", "time_median_error", "time_worst_error", "memory_mean_error", "tau", "pick_slowdown")
"""Columns of the printed table between the number of rows and those that ran out of memory."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(_PROGRAM, description=__doc__, epilog=_EXAMPLE, formatter_class=form)
    parser.add_argument("--table", required=True, type=Path, metavar="FILE.csv", help="measurements")
    fitted = parser.add_mutually_exclusive_group()
    fitted.add_argument("--fit", metavar="SOURCES", help="words of sources' names, separated by commas, or all")
    fitted.add_argument("--held-out", action="store_true", help="leave out one source after the other")
    parser.add_argument("--write", type=Path, metavar="FILE.json", help="file for what is fitted, or for intervals")
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
        predictions = accuracy.predict_rows(rows, [accuracy.Fitted(**one) for one in read_json(_SHIPPED)["fits"]])
    else:
        predictions = _fit_and_predict(options, rows)
    report = {**summary(predictions, options.held_out), "skipped": dict(skipped)}
    if options.held_out:
        report["coverage"] = coverage(residuals := list(residuals_of(rows)))
        if options.write is not None:
            if not residuals:
                raise UserError(f"{options.table}: no row has a step time, from which intervals could be made")
            found = {name: one._asdict() for name, one in sorted(intervals_of(residuals).items())}
            how = f"{SHARE:.0%} of measured over predicted step times of a further source, by configs/cluster as it is"
            _write(options, "--held-out", {"how": how, "intervals": found})
    print(json.dumps(report, indent=2) if options.json else markdown(report))


def _fit_and_predict(options: argparse.Namespace, rows: Sequence[Row]) -> list[accuracy.Prediction]:
    """Predict all rows by named sources other than theirs; rows of named ones by cross-validation, unless held out."""
    scopes = grouped(rows, attrgetter("scope"))
    words = {word.strip() for word in (options.fit or "all").lower().split(",")} - {""}
    named = {one: " ".join(one[:2]).lower() for one in scopes}
    chosen = {one: scopes[one] for one in scopes if "all" in words or any(word in named[one] for word in words)}
    if not chosen:
        names = "; ".join(sorted({source for source, *_ in scopes}))
        raise UserError(f"--fit {options.fit}: names no source of {options.table}; there are: {names}")
    large = [] if options.held_out else [scope for scope in chosen if len(chosen[scope]) >= accuracy.LEAST_ROWS]
    if options.write is not None and not options.held_out:
        fits = [accuracy.fit_rows(chosen[scope], scope) for scope in large]
        how = "factors over the figures of configs/cluster; Huber loss, at most 150 rows a source;"
        found = [asdict(one) for one in fits + accuracy.pooled(chosen)]
        _write(options, f"--fit {options.fit}", {"how": f"{how} * stands for all others", "fits": found})
    predictions: list[accuracy.Prediction] = []
    for scope, of_scope in scopes.items():
        others = {one: chosen[one] for one in chosen if one[0] != scope[0] and kind_of(one) == kind_of(scope)}
        if scope in large:
            predictions += accuracy.cross_validated(of_scope)
        else:
            predictions += accuracy.predict_rows(of_scope, accuracy.pooled(others))
    return predictions


def _write(options: argparse.Namespace, fitted: str, content: Mapping[str, Any]) -> None:
    """Write what was fitted, with how it was made, to four digits. Raises UserError if the file cannot be written."""
    command = f"{_PROGRAM} --table {options.table.name} {fitted} --write {options.write.name}"
    exact = json.dumps({"made_by": command, **content})
    text = json.dumps(json.loads(exact, parse_float=lambda number: float(f"{float(number):.4g}")), indent=1)
    with writing(options.write):
        options.write.write_text(text + "\n", encoding="utf-8")


def summary(predictions: Sequence[accuracy.Prediction], by_kind: bool = False) -> dict[str, Any]:
    """Return the errors by source, by kind of device where a source has several, and if `by_kind` by kind and format
    over all sources."""
    sources = grouped(predictions, lambda one: one.row.source)
    devices = grouped(predictions, lambda one: "{}, {} {}".format(*one.row.scope))
    kinds = grouped(predictions, lambda one: "all {} {}".format(*kind_of(one.row.scope)))
    several = {name: group for name, group in devices.items() if len(group) < len(sources[group[0].row.source])}
    return {
        "sources": {source: accuracy.summarise(group) for source, group in sources.items()},
        "devices": {name: accuracy.summarise(group) for name, group in several.items()},
        "kinds": {name: accuracy.summarise(group) for name, group in kinds.items() if by_kind},
        "all": accuracy.summarise(predictions),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a table in Markdown."""
    lines = ["| source | rows | mean | median | worst | memory | tau | pick | out of memory |", "|---|" + "---:|" * 8]
    for name, group in {**report["sources"], **report["devices"], **report["kinds"], "all": report["all"]}.items():
        cells = ["" if group[key] is None else format(group[key], ".2f" if key == "tau" else ".1%") for key in _FIGURES]
        told, failed = group["out_of_memory_told"], group["out_of_memory_rows"]
        cells = [name.replace("|", "/"), str(group["rows"]), *cells, f"{told} of {failed}" if failed else ""]
        lines.append(f"| {' | '.join(cells)} |")
    alarms = f"{report['all']['out_of_memory_false']} of {report['all']['rows']} that ran are called too large."
    lines += ["", f"Left out: {_join(report['skipped']) or 'nothing'}.", f"False alarms: {alarms}"]
    if counts := report.get("coverage"):
        inside, rows = map(sum, zip(*counts.values(), strict=True))
        mean = fmean(one / of_source for one, of_source in counts.values())
        lines.append(f"Intervals from other sources contain {inside} of {rows} rows, {mean:.0%} by source:")
        lines += [f"- {source}: {one} of {of_source}" for source, (one, of_source) in counts.items()]
    return "\n".join(lines)


def _join(skipped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} because {reason}" for reason, count in sorted(skipped.items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: validate(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
