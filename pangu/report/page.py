"""Self-contained HTML page that compares runs, without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from pangu.metrics.plots import smooth
from pangu.metrics.text import compact
from pangu.report.charts import Chart, Line, draw, escape
from pangu.report.runs import Run, differing, figures, find_runs, last, number, open_run

COLOURS = ("#2f6fde", "#e07b1a", "#2a9d5c", "#c23b4b", "#8a5cc9", "#8c6d46", "#d65fa8", "#6b7280", "#9aa51f", "#17a3b8")
MOST_EVENTS = 20
"""Largest number of events per run in the table of faults."""
_WORDS = ("state", "layout", "what", "parts, mean over ranks")
"""Names of text columns."""
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--pale:#66707f;--line:#dfe3ea;--card:#fff;--back:#f4f6f9;--best:#dff3e6}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--pale:#98a2b1;--line:#333b47;--card:#1d232c;--back:#14181f;
  --best:#1f4631}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:13.5px/1.5 system-ui,sans-serif}
main{max-width:1460px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:22px;margin:0}
h2{font-size:16px;margin:34px 0 10px}
p{margin:4px 0;color:var(--pale)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:14px 0 0}
.legend span,td.run{white-space:nowrap}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px;vertical-align:-1px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{padding:6px 9px;text-align:right;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;
  white-space:nowrap}
tr:last-child td{border-bottom:0}
th{color:var(--pale);font-weight:600;font-size:12px;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child,.words{text-align:left}
td.wrap{white-space:normal;text-align:left}
td.best{background:var(--best);font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 12px 6px}
figcaption{font-weight:600;margin:0 4px 4px}
svg{width:100%;height:auto;display:block}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
polyline.faint{stroke-width:.7;opacity:.45}
polyline.dots{stroke-dasharray:5 3;stroke-width:1.4}
.grid{stroke:var(--line)}
.mark{stroke-width:1;stroke-dasharray:2 3;opacity:.8}
.axis{fill:var(--pale);font-size:11px}
.bar{display:flex;height:20px;border-radius:5px;overflow:hidden;min-width:420px}
.bar i{display:block;height:100%}
code{font:13px ui-monospace,monospace}
"""


def render(paths: Sequence[Path], refresh_s: int | None = None) -> str:
    """Return the page about runs, or about those in folders of runs; raises UserError if one cannot be read."""
    folders = find_runs(paths)
    names = _names(folders)
    runs = [open_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    colours = {run.name: _colour(place) for place, run in enumerate(runs)}
    legend = "".join(f"<span>{_swatch(colours[run.name])}{escape(run.name)}</span>" for run in runs)
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    parts = [
        f"<h1>{'A run' if len(runs) == 1 else f'{len(runs)} runs'}</h1><p>{escape(when)}</p>",
        f'<div class="legend">{legend}</div>',
        "<h2>Figures</h2>" + _figures(runs, colours),
        _differences(runs, colours),
        "<h2>Curves</h2>" + _charts(runs, colours),
        _times(runs, colours),
        _sources(runs, colours),
        _benchmarks(runs, colours),
        _faults(runs, colours),
    ]
    return document("".join(parts), refresh_s)


def document(content: str, refresh_s: int | None = None) -> str:
    """Return a full page around HTML content, which may load and run nothing."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    head += "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    head += f"<title>Runs</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{content}</main></body></html>\n'


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as distinguish them."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _colour(index: int) -> str:
    return COLOURS[index] if index < len(COLOURS) else f"hsl({index * 137.5 % 360:.0f} 55% 48%)"


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{escape(colour)}"></span>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; `rows`: complete `<td>` cells."""
    head = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="card"><table><tr>{head}</tr>{body}</table></div>'


def _kind(head: str) -> str:
    return ' class="words"' if head in _WORDS else ""


def _run_cell(run: Run, colours: Mapping[str, str]) -> str:
    return f'<td class="run">{_swatch(colours[run.name])}{escape(run.name)}</td>'


def _figures(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the table of all runs, with the best of each column marked if there are several."""
    table = [figures(run) for run in runs]
    heads = list(table[0])
    best = {
        name: min((row[name][1] for row in table if math.isfinite(row[name][1])), default=math.nan) for name in heads
    }
    rows = []
    for run, row in zip(runs, table, strict=True):
        cells = [_run_cell(run, colours)]
        for name in heads:
            text, value = row[name]
            kind = "best" if len(runs) > 1 and value == best[name] else "words" if name in _WORDS else "number"
            cells.append(f'<td class="{kind}">{escape(text)}</td>')
        rows.append(cells)
    return _table(["run", *heads], rows)


def _differences(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the differing keys: one per column, as sweeps have many runs, or per row if there are few runs."""
    rows = differing(runs)
    if not rows:
        return ""
    title = "<h2>Differences in configuration</h2>"
    if len(rows) > len(runs):
        cells = [
            [f'<td class="words"><code>{escape(key)}</code></td>', *(f"<td>{escape(value)}</td>" for value in values)]
            for key, values in rows.items()
        ]
        return title + _table(["key", *(run.name for run in runs)], cells)
    by_run = [
        [_run_cell(run, colours), *(f"<td>{escape(values[place])}</td>" for values in rows.values())]
        for place, run in enumerate(runs)
    ]
    return title + _table(["run", *rows], by_run)


def _charts(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    def lines(column: str, smoothed: bool = False) -> list[Line]:
        return [
            Line(
                run.name,
                colours[run.name],
                run.columns["tokens"],
                _smoothed(run, column) if smoothed else run.columns[column],
            )
            for run in runs
        ]

    faint = [Line(run.name, colours[run.name], run.columns["tokens"], run.columns["loss"], "faint") for run in runs]
    held_out = [
        Line(
            f"{run.name}, validation", colours[run.name], run.columns["tokens"], run.columns["validation_loss"], "dots"
        )
        for run in runs
    ]
    of_sources = [
        Line(f"{run.name}, {name}", colours[run.name], run.columns["tokens"], losses, "dots")
        for run in runs
        for name, losses in run.sources.items()
    ]
    loss = [*(faint if len(runs) <= 6 else []), *lines("loss", smoothed=True), *held_out]
    decimals: Callable[[float], str] = "{:.4g}".format
    share: Callable[[float], str] = "{:.3g}".format
    charts = [
        Chart("Loss: training (line), validation (dots), nats per token", loss, decimals, marks=_marks(runs, colours)),
        Chart("Validation loss of each source, nats per token", of_sources, decimals),
        Chart("Tokens per second", lines("tokens_per_s", smoothed=True), compact, from_zero=True),
        Chart("Model FLOPs utilization", lines("mfu", smoothed=True), lambda value: f"{value:.0%}", from_zero=True),
        Chart("Peak memory of a device, GiB", lines("peak_memory_gib"), decimals, from_zero=True),
        Chart(
            "Share of step time waiting for data", lines("data_wait", smoothed=True), "{:.2%}".format, from_zero=True
        ),
        Chart("Gradient norm", lines("grad_norm", smoothed=True), decimals, from_zero=True),
        Chart("Learning rate", lines("lr"), "{:.2g}".format, from_zero=True),
        Chart("Loss scale", lines("loss_scale"), compact, from_zero=True),
        Chart("Experts: largest load over the mean", lines("experts/load", smoothed=True), share, from_zero=True),
        Chart("Experts: least load over the mean", lines("experts/least_load", smoothed=True), share, from_zero=True),
        Chart(
            "Experts: share of choices dropped",
            lines("experts/dropped", smoothed=True),
            "{:.1%}".format,
            from_zero=True,
        ),
    ]
    drawn = [draw(chart, compact, "tokens") for chart in charts]
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else "<p>No step has ended yet.</p>"


def _smoothed(run: Run, column: str) -> np.ndarray:
    values = run.columns[column]
    return smooth(values) if len(values) else values


def _marks(runs: Sequence[Run], colours: Mapping[str, str]) -> list[tuple[float, str, str]]:
    """Return the positions of faults and restarts on the axis of tokens."""
    marks = []
    for run in runs:
        tokens = dict(zip(run.columns["step"].tolist(), run.columns["tokens"].tolist(), strict=True))
        for step, says in list(run.events())[:MOST_EVENTS]:
            if math.isfinite(place := tokens.get(float(step), math.nan)):
                marks.append((place, colours[run.name], f"{run.name}, step {step}: {says}"))
    return marks


def _times(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the breakdown of a profiled step's time."""
    rows = []
    for run in runs:
        profile = run.summary.get("profile")
        terms = profile.get("terms_s") if isinstance(profile, dict) else None
        parts = {str(name): number(value) or 0.0 for name, value in terms.items()} if isinstance(terms, dict) else {}
        total = sum(max(0.0, seconds) for seconds in parts.values())
        if not total:
            continue
        shares = [
            (name, seconds / total, _colour(place)) for place, (name, seconds) in enumerate(list(parts.items())[:20])
        ]
        bar = "".join(
            f'<i style="width:{100 * share:.2f}%;background:{escape(colour)}" title="{escape(name)} {share:.1%}"></i>'
            for name, share, colour in shares
        )
        words = " ".join(
            f"{_swatch(colour)}{escape(name)} {share:.1%}&ensp;" for name, share, colour in shares if share >= 0.005
        )
        cells = [f'<td class="wrap"><div class="bar">{bar}</div>{words}</td>', f"<td>{total:.4g} s</td>"]
        rows.append([_run_cell(run, colours), *cells])
    return "<h2>Time of a profiled step</h2>" + _table(["run", "parts, mean over ranks", "step"], rows) if rows else ""


def _benchmarks(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the newest benchmark results."""
    newest = [
        next((part for record in reversed(run.records) if isinstance(part := record.get("evaluation"), dict)), {})
        for run in runs
    ]
    texts = [
        {str(name): "-" if (value := number(part[name])) is None else f"{value:.4g}" for name in part}
        for part in newest
    ]
    return _table_of("Benchmarks", runs, colours, texts)


def _sources(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    """Return the newest loss and perplexity on each source of the validation split."""
    newest = [{name: last(losses) for name, losses in run.sources.items()} for run in runs]
    texts = [{name: f"{loss:.5g} ({math.exp(min(loss, 700)):.4g})" for name, loss in part.items()} for part in newest]
    return _table_of("Validation by source: loss (perplexity)", runs, colours, texts)


def _table_of(title: str, runs: Sequence[Run], colours: Mapping[str, str], texts: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a column for each name that a run has a text for."""
    names = list(dict.fromkeys(name for part in texts for name in part))[:50]
    rows = [
        [_run_cell(run, colours), *(f"<td>{escape(part.get(name, '-'))}</td>" for name in names)]
        for run, part in zip(runs, texts, strict=True)
    ]
    return f"<h2>{title}</h2>" + _table(["run", *names], rows) if names else ""


def _faults(runs: Sequence[Run], colours: Mapping[str, str]) -> str:
    rows = []
    for run in runs:
        events = list(run.events())
        rows += [
            [_run_cell(run, colours), f"<td>{step:,}</td>", f'<td class="wrap">{escape(says)}</td>']
            for step, says in events[:MOST_EVENTS]
        ]
        if len(events) > MOST_EVENTS:
            rows.append(
                [_run_cell(run, colours), "<td></td>", f'<td class="wrap">and {len(events) - MOST_EVENTS} more</td>']
            )
    return "<h2>Faults and restarts</h2>" + _table(["run", "step", "what"], rows) if rows else ""
