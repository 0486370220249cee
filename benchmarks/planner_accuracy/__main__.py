"""Compares the planner's cost model with published measurements of training steps: how far off are its times and its
memory, in which order does it put layouts, how much slower is the one it picks.

Without --fit the shipped coefficients are used (benchmarks/results/planner_fit.json); with it they are fitted again,
and each row is predicted by coefficients that were fitted without it. With --held-out each source is predicted by what
all other sources tell of its devices, as one that was never seen is."""

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
from benchmarks.planner_accuracy.measurements import Row, Scope, grouped, kind_of, read_rows
from benchmarks.planner_accuracy.published import RULES
from pangu.common.errors import UserError, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import read_json
from pangu.report.intervals import SHARE

_SHIPPED = Path(__file__).resolve().parents[1] / "results" / "planner_fit.json"
_PROGRAM = "python -m benchmarks.planner_accuracy"
_EXAMPLE = """example:
  python -m benchmarks.planner_accuracy --table measurements.csv
  python -m benchmarks.planner_accuracy --table measurements.csv --fit --write planner_fit.json

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
    fitted.add_argument("--fit", action="store_true", help="fit coefficients, and predict each row without it")
    fitted.add_argument("--held-out", action="store_true", help="leave out one source after the other")
    parser.add_argument("--write", type=Path, metavar="FILE.json", help="file for what is fitted, or for intervals")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table in Markdown")
    return parser.parse_args(arguments)


def validate(options: argparse.Namespace) -> None:
    """Print the accuracy of predictions. Raises UserError."""
    rows, skipped = read_rows(options.table)
    if not rows:
        raise UserError(f"{options.table}: no row can be used: {_join(skipped) or 'there is none'}")
    if options.fit or options.held_out:
        predictions = _fit_and_predict(options, grouped(rows, attrgetter("scope")))
    elif options.write is not None:
        raise UserError("--write needs --fit or --held-out: there is nothing new to write")
    else:
        fits = [accuracy.Fitted(**one) for one in read_json(_SHIPPED)["fits"]]
        predictions = [accuracy.predict(row, accuracy.fitted_for(row, fits)) for row in rows]
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


def _fit_and_predict(options: argparse.Namespace, scopes: Mapping[Scope, Sequence[Row]]) -> list[accuracy.Prediction]:
    """Predict all rows by cross-validation, or by other sources than theirs if these are few, or held out."""
    large = [one for one in scopes if len(scopes[one]) >= RULES.least_rows and not options.held_out]
    if options.write is not None and not options.held_out:
        fits = [accuracy.fit_rows(scopes[scope], scope) for scope in large] + accuracy.pooled(scopes)
        how = "factors over the figures of configs/cluster; Huber loss, at most 150 rows a source;"
        _write(options, "--fit", {"how": f"{how} * stands for all others", "fits": list(map(asdict, fits))})
    predictions: list[accuracy.Prediction] = []
    for scope, rows in scopes.items():
        if scope in large:
            predictions += accuracy.cross_validated(rows)
        else:
            others = {one: scopes[one] for one in scopes if one[0] != scope[0] and kind_of(one) == kind_of(scope)}
            pools = accuracy.pooled(others)
            predictions += [accuracy.predict(row, accuracy.fitted_for(row, pools)) for row in rows]
    return predictions


def _write(options: argparse.Namespace, fitted: str, content: Mapping[str, Any]) -> None:
    """Write what was fitted, with how it was made, to four digits. Raises UserError if the file cannot be written."""
    command = f"{_PROGRAM} --table {options.table.name} {fitted} --write {options.write.name}"
    short = json.loads(json.dumps({"made_by": command, **content}), parse_float=lambda one: float(f"{float(one):.4g}"))
    with writing(options.write):
        options.write.write_text(json.dumps(short, indent=1) + "\n", encoding="utf-8")


def summary(predictions: Sequence[accuracy.Prediction], by_kind: bool) -> dict[str, Any]:
    """Return the errors by source, by device where a source has several, if `by_kind` by kind of device, and of all."""
    sources = grouped(predictions, lambda one: one.row.source)
    devices = grouped(predictions, lambda one: "{}, {} {}".format(*one.row.scope))
    several = {name: group for name, group in devices.items() if len(group) < len(sources[group[0].row.source])}
    kinds = grouped(predictions if by_kind else (), lambda one: "all {} {}".format(*kind_of(one.row.scope)))
    parts = {"sources": sources, "devices": several, "kinds": kinds}
    errors = {part: {name: accuracy.summarise(own) for name, own in groups.items()} for part, groups in parts.items()}
    return {**errors, "all": accuracy.summarise(predictions)}


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a table in Markdown."""
    lines = ["| source | rows | mean | median | worst | memory | tau | pick | out of memory |", "|---|" + "---:|" * 8]
    for name, group in {**report["sources"], **report["devices"], **report["kinds"], "all": report["all"]}.items():
        cells = ["" if group[key] is None else format(group[key], ".2f" if key == "tau" else ".1%") for key in _FIGURES]
        told, failed = group["out_of_memory_told"], group["out_of_memory_rows"]
        cells = [name.replace("|", "/"), str(group["rows"]), *cells, f"{told} of {failed}" if failed else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Left out: {_join(report['skipped']) or 'nothing'}."]
    lines.append("False alarms: {out_of_memory_false} of {rows} that ran are called too large.".format(**report["all"]))
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
