"""Keys that were renamed: the old name still works, with a warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger("pangu")

RENAMED = {
    "parallel.allowed": "parallel.layouts",
    "precision.fp32_products": "precision.fp32_matmul",
    "data.later_weights": "data.weight_schedule",
    "faults.slow_every": "faults.straggler_every",
    "faults.slow_factor": "faults.straggler_factor",
}
"""Old name -> new name, in the same group."""


def with_new_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration, nested dictionaries, with new names; an old name replaces the value of its new one.

    A default of the new name may stand beside an old one that was given.
    """
    for old, new in RENAMED.items():
        group, _, key = old.partition(".")
        keys = values.get(group)
        if isinstance(keys, Mapping) and key in keys:
            _warn(old, new)
            others = {name: value for name, value in keys.items() if name != key}
            values = {**values, group: {**others, new.rpartition(".")[2]: keys[key]}}
    return values


@cache
def _warn(old: str, new: str) -> None:
    log.warning("%s is deprecated; set %s instead", old, new)
