"""Statistics and plots of document lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    counts = np.zeros(32 * _BINS, dtype=np.int64)
    shortest, longest, total = 2**31, 0, 0
    for part in _parts(lengths):
        counts += np.bincount(_bin(part), minlength=len(counts))
        shortest, longest = min(shortest, int(part.min())), max(longest, int(part.max()))
        total += int(part.sum(dtype=np.int64))
    return {
        "documents": len(lengths),
        "tokens": total,
        "lengths": {
            "shortest": shortest if len(lengths) else 0,
            **_quantiles(lengths, counts),
            "longest": longest,
            "mean": total / max(len(lengths), 1),
        },
        "histogram": {str(_length(int(number))): int(counts[number]) for number in np.flatnonzero(counts)},
    }


def _parts(lengths: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    for begin in range(0, len(lengths), _AT_ONCE):
        yield np.asarray(lengths[begin : begin + _AT_ONCE])


def _quantiles(lengths: NDArray[np.int32], counts: NDArray[np.int64]) -> dict[str, int]:
    """Return for each quantile the smallest document length that this percentage of documents does not exceed."""
    # a second pass counts only lengths in the bins that hold the quantiles, so that memory stays bounded
    ranks = {name: -(-percent * len(lengths) // 100) for name, percent in _QUANTILES.items()}
    below = np.concatenate([[0], np.cumsum(counts)])
    bins = {name: int(np.searchsorted(below[1:], rank)) for name, rank in ranks.items()}
    inside: dict[int, Counter[int]] = {number: Counter() for number in bins.values()}
    for part in _parts(lengths):
        numbers = _bin(part)
        for number, counter in inside.items():
            values, times = np.unique(part[numbers == number], return_counts=True)
            counter.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    found = {}
    for name, number in bins.items():
        ordered = sorted(inside[number].items())
        reached = below[number] + np.cumsum([times for _, times in ordered])
        found[name] = ordered[int(np.searchsorted(reached, ranks[name]))][0] if ordered else 0
    return found


def _bin(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.floor(_BINS * np.log2(np.maximum(lengths, 1))).astype(np.int64)


def _length(number: int) -> int:
    return int(np.ceil(2 ** (number / _BINS)))


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
