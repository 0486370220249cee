"""Self-contained HTML page that compares runs, without scripts or network access; its template is page.html."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from pangu.common.errors import printable
from pangu.metrics.columns import Series, smooth
from pangu.metrics.text import compact
from pangu.report.charts import Chart, Line, draw
from pangu.report.runs import Run, differing, figures, find_runs, last, number, open_run

ROUNDING = 1e-5
"""Largest relative difference of losses that layouts, kernels and devices cause by rounding alone."""
_SIMILAR = 0.01
"""Relative difference of speeds below which none is called faster."""
_MOST_KEYS = 8
COLOURS = ("#2f6fde", "#e07b1a", "#2a9d5c", "#c23b4b", "#8a5cc9", "#8c6d46", "#d65fa8", "#6b7280", "#9aa51f", "#17a3b8")
MOST_EVENTS = 20
"""Largest number of events per run in the table of faults."""
_MOST_COLUMNS = 50
_WORDS = ("state", "layout", "what", "parts, mean over ranks")
"""Names of text columns."""
_KEY_FIGURES = ("state", "loss", "validation", "tokens/s", "MFU", "goodput")
"""Names of figures that stand before all tables, in lines that wrap on a phone."""
_CURVES: tuple[tuple[str, str, bool, Callable[[float], str]], ...] = (
    ("Tokens per second", "tokens_per_s", True, compact),
    ("Model FLOPs utilization", "mfu", True, "{:.0%}".format),
    ("Peak memory of a device, GiB", "peak_memory_gib", False, "{:.4g}".format),
    ("Share of step time waiting for data", "data_wait", True, "{:.2%}".format),
    ("Gradient norm", "grad_norm", True, "{:.4g}".format),
    ("Learning rate", "lr", False, "{:.2g}".format),
    ("Loss scale", "loss_scale", False, compact),
    ("Experts: largest load over the mean", "experts/load", True, "{:.3g}".format),
    ("Experts: least load over the mean", "experts/least_load", True, "{:.3g}".format),
    ("Experts: share of choices dropped", "experts/dropped", True, "{:.1%}".format),
)
"""Title, column, whether the curve is smoothed, and format of each chart after those of the losses."""


def render(paths: Sequence[Path], refresh_s: int | None = None) -> str:
    """Return the page about runs, or about those in folders of runs; raises UserError if one cannot be read."""
    folders = find_runs(paths)
    runs = [open_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    colours = {run.name: _colour(place) for place, run in enumerate(runs)}
    table = [figures(run) for run in runs]
    values = {name: [row[name][1] for row in table if math.isfinite(row[name][1])] for name in table[0]}
    return fill_template(
        "page.html",
        refresh_s=refresh_s,
        when=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
        words=_WORDS,
        key_figures=_KEY_FIGURES,
        runs=runs,
        colours=colours,
        verdict=compare(*runs) if len(runs) == 2 else [],
        figures=table,
        best={name: min(known, default=math.nan) for name, known in values.items()},
        differing=differing(runs),
        charts=[drawn for chart in _charts(runs, colours) if (drawn := draw(chart, compact, "tokens"))],
        times=[(run, *found) for run in runs if (found := _times(run))],
        tables={
            "Validation by source: loss (perplexity)": list(map(_sources, runs)),
            "Benchmarks": list(map(_benchmarks, runs)),
        },
        faults=[(run, *event) for run in runs for event in _faults(run)],
    )


def render_problem(problem: object, refresh_s: int) -> str:
    """Return the page with a problem in place of the runs."""
    return fill_template("page.html", refresh_s=refresh_s, problem=problem)


def fill_template(name: str, **values: Any) -> str:
    """Return an HTML page. Values are escaped for HTML, in attributes too, and control characters in them as text."""
    environment = Environment(
        loader=PackageLoader("pangu.report", "."),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
    )
    environment.globals |= {"zip": zip, "merged": lambda rows: list(dict.fromkeys(chain(*rows)))[:_MOST_COLUMNS]}
    return environment.get_template(name).render(values)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as distinguish them."""
    parts = [(folder.resolve() if ".." in folder.parts else folder.absolute()).parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _colour(index: int) -> str:
    return COLOURS[index] if index < len(COLOURS) else f"hsl({index * 137.5 % 360:.0f} 55% 48%)"


def _charts(runs: Sequence[Run], colours: Mapping[str, str]) -> list[Chart]:
    def line(run: Run, values: Series, style: str = "line", part: str = "") -> Line:
        return Line(f"{run.name}{part}", colours[run.name], run.columns["tokens"], values, style)

    losses = [line(run, run.columns["loss"], "faint") for run in runs if len(runs) <= 6]
    losses += [line(run, smooth(run.columns["loss"])) for run in runs]
    losses += [line(run, run.columns["validation_loss"], "dots", ", validation") for run in runs]
    sources = [line(run, each, "dots", f", {name}") for run in runs for name, each in run.sources.items()]
    title = "Loss: training (line), validation (dots), nats per token"
    charts = [
        Chart(title, losses, "{:.4g}".format, marks=_marks(runs, colours)),
        Chart("Validation loss of each source, nats per token", sources, "{:.4g}".format),
    ]
    for title, column, smoothed, text in _CURVES:
        columns = [(run, run.columns[column]) for run in runs]
        lines = [line(run, smooth(values) if smoothed else values) for run, values in columns]
        charts.append(Chart(title, lines, text, from_zero=True))
    return charts


def _marks(runs: Sequence[Run], colours: Mapping[str, str]) -> list[tuple[float, str, str]]:
    """Return the positions of faults and restarts on the axis of tokens."""
    marks = []
    for run in runs:
        tokens = dict(zip(run.columns["step"].tolist(), run.columns["tokens"].tolist(), strict=True))
        for step, says in list(run.events())[:MOST_EVENTS]:
            if math.isfinite(place := tokens.get(float(step), math.nan)):
                marks.append((place, colours[run.name], f"{run.name}, step {step}: {says}"))
    return marks


def _times(run: Run) -> tuple[float, list[tuple[str, float, str]]] | None:
    """Return the seconds of a profiled step, and name, share and color of its parts; None without a profile."""
    profile = run.summary.get("profile")
    terms = profile.get("terms_s") if isinstance(profile, dict) else None
    parts = {str(name): number(value) or 0.0 for name, value in terms.items()} if isinstance(terms, dict) else {}
    total = sum(max(0.0, seconds) for seconds in parts.values())
    shown = enumerate(list(parts.items())[:20])
    return (total, [(name, seconds / total, _colour(place)) for place, (name, seconds) in shown]) if total else None


def _benchmarks(run: Run) -> dict[str, str]:
    newest = next((part for record in reversed(run.records) if isinstance(part := record.get("evaluation"), dict)), {})
    return {str(name): "-" if (value := number(newest[name])) is None else f"{value:.4g}" for name in newest}


def _sources(run: Run) -> dict[str, str]:
    """Return the newest loss and perplexity on each source of the validation split."""
    newest = {name: last(losses) for name, losses in run.sources.items()}
    return {name: f"{loss:.5g} ({math.exp(min(loss, 700)):.4g})" for name, loss in newest.items()}


def _faults(run: Run) -> list[tuple[str, str]]:
    events = [(f"{step:,}", says) for step, says in run.events()]
    more = [("", f"and {len(events) - MOST_EVENTS} more")] if len(events) > MOST_EVENTS else []
    return events[:MOST_EVENTS] + more


def compare(first: Run, second: Run) -> list[str]:
    """Return a verdict on two runs in sentences: losses at equal tokens, speed, and keys in which they differ."""
    sentences = list(_losses(first, second))
    if pairs := _pairs(first, second, "validation_loss"):
        sentences.append(_better("Validation loss", first, second, pairs[max(pairs)], max(pairs)))
    keys = [f"{key} ({one} / {two})" for key, (one, two) in differing([first, second]).items()]
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    found = f"Configuration: {', '.join(keys[:_MOST_KEYS]) or 'the same keys'}{more}."
    return [*sentences, *_speed(first, second), found]


def _pairs(first: Run, second: Run, column: str) -> dict[float, tuple[float, float]]:
    """Return the values of both runs by the tokens trained on, where both are finite."""
    one, two = (dict(zip(run.columns["tokens"], run.columns[column], strict=True)) for run in (first, second))
    found = {float(tokens): (float(value), float(two[tokens])) for tokens, value in one.items() if tokens in two}
    return {tokens: pair for tokens, pair in found.items() if all(map(math.isfinite, pair))}


def _losses(first: Run, second: Run) -> Iterator[str]:
    """Compare the losses of all common steps, then the smoothed ones at the last number of tokens that both have."""
    pairs = _pairs(first, second, "loss")
    if not pairs:
        return
    worst = max(abs(one - two) / max(abs(one), abs(two), 1e-30) for one, two in pairs.values())
    if worst <= ROUNDING:
        equal = "bit for bit" if worst == 0 else f"up to rounding (relative difference at most {worst:.1e})"
        yield f"Loss: equal {equal} in all {len(pairs):,} common steps."
        return
    tokens = max(pairs)
    smoothed = [float(smooth(run.columns["loss"])[run.columns["tokens"] == tokens][-1]) for run in (first, second)]
    yield f"{_better('Loss', first, second, smoothed, tokens)} Single steps differ by up to {100 * worst:.2g}%."


def _better(what: str, first: Run, second: Run, values: Sequence[float], tokens: float) -> str:
    low, high = (f"{value:.4f}" for value in sorted(values))
    if low == high:
        return f"{what}: equal, {low} after {compact(tokens)} tokens."
    name = (first if values[0] < values[1] else second).name
    return f"{what}: {name} is better, {low} against {high} after {compact(tokens)} tokens."


def _speed(first: Run, second: Run) -> Iterator[str]:
    rates = [run.median("tokens_per_s") for run in (first, second)]
    if all(math.isfinite(rate) and rate > 0 for rate in rates):
        slow, fast = sorted(rates)
        if fast / slow < 1 + _SIMILAR:
            yield f"Speed: equal within {_SIMILAR:.0%}, {compact(fast)} tokens/s."
        else:
            name = (first if rates[0] == fast else second).name
            yield f"Speed: {name} is {fast / slow:.3g} times as fast, {compact(fast)} against {compact(slow)} tokens/s."
