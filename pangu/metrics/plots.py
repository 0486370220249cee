"""Plots of a run, drawn from metrics.jsonl alone."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pangu.common.errors import writing
from pangu.common.files import write_atomically
from pangu.metrics.columns import Series, read_columns, smooth


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
