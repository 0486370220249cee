"""Columns of metrics.jsonl as arrays, and moving averages of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.metrics.record import read_records

Series = NDArray[np.float64]
MOST_FIGURE = 1e100
"""Largest magnitude of a metric in a plot; a larger one counts as not finite."""


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
