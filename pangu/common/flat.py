"""Flattening of nested tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any


def flatten(values: Mapping[str, Any], most: int = 10_000) -> dict[str, Any]:
    """Return the values of nested tables by dotted name; lists are values. Raises ValueError for more than `most`."""
    flat = dict(islice(_flattened(values, "", 20), most + 1))
    if len(flat) > most:
        raise ValueError(f"more than {most:,} settings")
    return flat


def _flattened(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and depth:
            yield from _flattened(value, f"{prefix}{key}.", depth - 1)
        else:
            yield f"{prefix}{key}", value
