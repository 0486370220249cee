"""How long documents are, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS = 16
"""Of a doubling of the length: shares of documents are read from them to 4 %."""
_AT_ONCE = 1 << 22


def length_statistics(lengths: NDArray[np.int32]) -> dict[str, Any]:
    """Of documents of so many tokens, [documents], which may be mapped into memory. `histogram` counts them by the
    sixteenth of a doubling that holds their length."""
    counts = np.zeros(32 * _BINS, dtype=np.int64)
    shortest, longest, total = 2**31, 0, 0
    for begin in range(0, len(lengths), _AT_ONCE):
        part = np.asarray(lengths[begin : begin + _AT_ONCE])
        counts += np.bincount(_bin(part), minlength=len(counts))
        shortest, longest = min(shortest, int(part.min())), max(longest, int(part.max()))
        total += int(part.sum(dtype=np.int64))
    share = np.cumsum(counts) / max(len(lengths), 1)
    middle = {
        name: _length(int(np.searchsorted(share, at))) for name, at in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {
        "documents": len(lengths),
        "tokens": total,
        "lengths": {"shortest": shortest, **middle, "longest": longest, "mean": total / max(len(lengths), 1)},
        "histogram": {str(_length(int(number))): int(counts[number]) for number in np.flatnonzero(counts)},
    }


def _bin(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.floor(_BINS * np.log2(np.maximum(lengths, 1))).astype(np.int64)


def _length(number: int) -> int:
    """The least length of a bin."""
    return int(np.ceil(2 ** (number / _BINS)))


def plot_lengths(statistics: dict[str, Any], path: Path, title: str) -> None:
    """Draw how many documents, and how many tokens, are in documents of each length. Raises UserError if the picture
    cannot be written."""
    from matplotlib.figure import Figure

    from pangu.metrics.plots import write_figure

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
