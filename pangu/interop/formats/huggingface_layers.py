"""Fields of config.json that say which layers have a window, and which rotate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError
from pangu.config.model import LayerPattern, is_among
from pangu.interop.formats.fields import wrong_field


def no_rope_layers(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read the layers without rotation, from a list with 1 for each layer that rotates, or from their period."""
    rotates, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval", 4)
    if not isinstance(every, int) or every < 1:
        raise wrong_field(path, "no_rope_layer_interval", every, "must be a positive integer")
    if rotates is None:
        rotates = [int(not is_among(layer, every)) for layer in range(keys["layers"])]
    if not isinstance(rotates, list) or len(rotates) != keys["layers"] or any(one not in (0, 1) for one in rotates):
        raise wrong_field(path, "no_rope_layers", rotates, f"must be a list of {keys['layers']} zeros and ones")
    keys["nope_layers"] = _pattern([layer for layer, turns in enumerate(rotates) if not turns], keys["layers"])
    # where `layer_types` does not say so, the layers without rotation have the window
    keys["full_layers"] = tuple(layer for layer, turns in enumerate(rotates) if turns)


def layer_types(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read `window` and `full_layers`, from which transformers builds the list where a file has none."""
    types, layers, kinds = config.get("layer_types"), keys["layers"], ("full_attention", "sliding_attention")
    if types is None and keys["full_layers"] == "as given":
        raise UserError(f"{path}: layer_types must be given")
    if types is None:
        full = [layer for layer in range(layers) if is_among(layer, keys["full_layers"])]
    else:
        if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
            rule, fix = "is not supported", f"use {' or '.join(kinds)} for each of the {layers} layers"
            raise wrong_field(path, "layer_types", types, rule, fix)
        full = [layer for layer, kind in enumerate(types) if kind == kinds[0]]
        if len(full) < layers and keys["window"] is None:
            raise wrong_field(path, "layer_types", types, "needs a window", "set sliding_window, or use full_attention")
    keys["window"] = None if len(full) == layers else keys["window"]
    keys["full_layers"] = None if keys["window"] is None else _pattern(full, layers)


def _pattern(chosen: Sequence[int], layers: int) -> LayerPattern:
    """Return the shortest pattern of some layers."""
    every = next((n for n in range(1, layers + 1) if list(chosen) == list(range(n - 1, layers, n))), None)
    return (every or tuple(chosen)) if chosen else None
