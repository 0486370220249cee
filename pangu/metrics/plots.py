"""Plots of a run, drawn from metrics.jsonl alone."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from pangu.common.errors import writing
from pangu.common.files import write_atomically
from pangu.metrics.record import read_records

Series = NDArray[np.float64]
MOST_FIGURE = 1e100
"""Largest magnitude of a metric in a plot; a larger one counts as not finite."""


def plot_loss(metrics_jsonl: Path, png: Path, title: str) -> None:
    """Draw training loss, validation loss and learning rate against tokens seen.

    Steps with a null loss (not finite) leave a gap, incomplete lines are skipped, and a file without any loss gives an
    empty plot. Raise `UserError` if the plot cannot be written.
    """
    columns = read_columns(metrics_jsonl, ("tokens", "loss", "lr", "validation_loss"))
    tokens, loss = columns["tokens"], columns["loss"]
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if np.isfinite(loss).any():
        _draw_rate(axes, tokens, columns["lr"])
        _draw_loss(axes, tokens, loss, columns["validation_loss"])
    else:
        axes.text(0.5, 0.5, "no losses to draw", transform=axes.transAxes, ha="center", color="gray")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a folder's name may hold dollar signs
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines["top"].set_visible(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a Chinese title where there is no Chinese font
        write_figure(figure, png)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its file extension; raise `UserError` if it cannot be written."""
    FigureCanvasAgg(figure)  # not pyplot, which keeps every figure in a process-wide list and may look for a display
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:])
        write_atomically(path, content.getvalue())


def _draw_loss(axes: Axes, tokens: Series, loss: Series, validation: Series) -> None:
    axes.plot(tokens, loss, color="tab:blue", linewidth=0.6, alpha=0.35, label="training, each step")
    axes.plot(tokens, smooth(loss), color="tab:blue", linewidth=1.8, label="training, smoothed")
    validated = np.isfinite(validation)
    if validated.any():
        at, values = tokens[validated], validation[validated]
        axes.plot(at, values, color="tab:orange", marker="o", markersize=4, linewidth=1.2, label="validation")
    # below the picture: inside it would hide the learning rate or its axis
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def _draw_rate(axes: Axes, tokens: Series, rate: Series) -> None:
    right = axes.twinx()
    right.plot(tokens, rate, color="0.75", linewidth=1, linestyle="--")
    right.set_ylabel("learning rate", color="0.55")
    right.tick_params(axis="y", colors="0.55")
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right.set_ylim(bottom=0)
    right.spines["top"].set_visible(False)
    # A twin axis is drawn last; the loss belongs in front of it.
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


def read_columns(metrics_jsonl: Path, names: Sequence[str]) -> dict[str, Series]:
    """Return columns of a metrics.jsonl file, which are empty if there is no file."""
    return columns_of(read_records(metrics_jsonl), names)


def columns_of(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Series]:
    """Return columns of records by field name, with NaN where a record has null or lacks the field."""
    return {name: np.array([_number(fields.get(name)) for fields in records], np.float64) for name in names}


def _number(value: object) -> float:
    """Return a float, or NaN for a non-number and for a number whose sums or differences could overflow."""
    most = 2**63 if isinstance(value, int) else MOST_FIGURE
    return float(value) if isinstance(value, int | float) and abs(value) < most else math.nan


def smooth(values: Series) -> Series:
    """Return the centered moving average over 1/50 of the curve (at least 3 points), ignoring and keeping NaN."""
    # Centered, because an average over the past lies above a falling curve.
    size = 2 * max(1, len(values) // 100) + 1
    finite = np.isfinite(values)
    sums, counts = _windows(np.where(finite, values, 0.0), size), _windows(finite.astype(np.float64), size)
    return np.where(finite, sums / np.maximum(counts, 1), math.nan)


def _windows(values: Series, size: int) -> Series:
    """Return the sums of `size` values centered at each value, in time that does not grow with `size`.

    Split into blocks of `size` values, each window is the end of one block plus the beginning of the next, so two
    cumulative sums per block suffice. As sums never leave a block, a huge value blurs only its neighbors.
    """
    count, half = len(values), size // 2
    blocks = np.pad(values, (half, half + -(count + 2 * half) % size)).reshape(-1, size)
    upto, onwards = blocks.cumsum(1).ravel(), blocks[:, ::-1].cumsum(1)[:, ::-1].ravel()
    first = np.arange(count)
    return onwards[first] + np.where(first % size == 0, 0.0, upto[first + size - 1])
