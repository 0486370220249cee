"""Keys that were renamed: the old name still works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

RENAMED = {
    "parallel.allowed": "parallel.layouts",
    "parallel.virtual": "parallel.virtual_stages",
    "precision.fp32_products": "precision.fp32_matmul",
    "data.later_weights": "data.weight_schedule",
    "faults.slow_every": "faults.straggler_every",
    "faults.slow_factor": "faults.straggler_factor",
}
"""Old name -> new name, in the same group."""


def with_new_names(
    values: Mapping[str, Any], given: Sequence[str] = (), note_old: Callable[[str], None] = lambda old: None
) -> dict[str, Any]:
    """Return a configuration with new names for renamed keys, also in the entries of `parallel.layouts`.

    Args:
        values: Nested dictionaries. An old name replaces the value of its new one, which may be a default.
        given: Keys that a command line sets, in this order: a new name after its old one keeps its value.
        note_old: Called with each old name.
    """
    renamed, place = dict(values), {key: number for number, key in enumerate(given)}
    for old, new in RENAMED.items():
        group, _, old_key = old.partition(".")
        keys, new_key = renamed.get(group), new.rpartition(".")[2]
        if isinstance(keys, Mapping) and old_key in keys:
            note_old(old)
            others = {key: value for key, value in keys.items() if key != old_key}
            is_later = place.get(new, -1) > place.get(old, -1)
            renamed[group] = others if is_later and new_key in others else {**others, new_key: keys[old_key]}
    parallel = renamed.get("parallel")
    layouts = parallel.get("layouts") if isinstance(parallel, Mapping) else None
    if isinstance(layouts, (list, tuple)):
        entries = [with_new_names({"parallel": entry}, note_old=note_old)["parallel"] for entry in layouts]
        renamed["parallel"] = {**renamed["parallel"], "layouts": entries}
    return renamed
