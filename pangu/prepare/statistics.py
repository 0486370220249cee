"""Statistics and plots of document lengths."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pangu.metrics.plots import write_figure

_BINS = 16  # histogram bins per doubling of the length
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}  # percent of the documents that are not longer
_AT_ONCE = 1 << 22


def length_statistics(lengths: NDArray[np.int32]) -> dict[str, Any]:
    """Summarize document lengths in tokens, [documents], which may be memory-mapped.

    The median and other quantiles are lengths of actual documents; `histogram` has 16 bins per doubling of the length.
    """
    # Few entries: documents of n different lengths have at least n²/2 tokens
    counter: Counter[int] = Counter()
    for begin in range(0, len(lengths), _AT_ONCE):
        values, times = np.unique(lengths[begin : begin + _AT_ONCE], return_counts=True)
        counter.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    found = np.array(sorted(counter.items()) or [(0, 0)], dtype=np.int64)
    each, reached, total = found[:, 0], np.cumsum(found[:, 1]), int(np.prod(found, axis=1).sum())
    ranks = {name: -(-percent * len(lengths) // 100) for name, percent in _QUANTILES.items()}
    bins = np.floor(_BINS * np.log2(np.maximum(each, 1))).astype(np.int64)
    counts = np.bincount(bins, found[:, 1]).astype(np.int64).tolist()
    return {
        "documents": len(lengths),
        "tokens": total,
        "lengths": {
            "shortest": int(each[0]),
            **{name: int(each[np.searchsorted(reached, rank)]) for name, rank in ranks.items()},
            "longest": int(each[-1]),
            "mean": total / max(len(lengths), 1),
        },
        "histogram": {str(math.ceil(2 ** (n / _BINS))): count for n, count in enumerate(counts) if count},
    }


def plot_lengths(statistics: dict[str, Any], path: Path, title: str) -> None:
    """Plot the share of documents and of tokens by document length. Raises UserError if the file cannot be written."""
    lengths = np.array([int(length) for length in statistics["histogram"]])
    counts = np.array(list(statistics["histogram"].values()))
    octaves = np.floor(np.log2(lengths)).astype(int)
    figure = Figure(figsize=(7, 4), dpi=100)
    axes = figure.add_subplot()
    for values, label, shift in ((counts, "documents", -0.2), (counts * lengths, "tokens", 0.2)):
        shares = np.bincount(octaves, values) / values.sum()
        axes.bar(np.arange(len(shares)) + shift, 100 * shares, width=0.4, label=label)
    axes.set_xticks(range(octaves.max() + 1), [f"{2**octave:,}" for octave in range(octaves.max() + 1)], rotation=60)
    axes.set(xlabel="tokens of a document, at least", ylabel="%")
    axes.set_title(title, parse_math=False)
    axes.legend(frameon=False)
    figure.subplots_adjust(bottom=0.25)
    write_figure(figure, path)
