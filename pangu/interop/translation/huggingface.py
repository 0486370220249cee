"""Translation of transformers' config.json, with the reader that converts checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pangu.config.model import LatentConfig, RouterConfig
from pangu.config.rope import RopeScaling
from pangu.interop.formats.fields import load_table as load_fields
from pangu.interop.formats.huggingface_config import ModelType, kind_in, read_model
from pangu.interop.translation.table import Table, Translation, load_table


def _table(kind: ModelType) -> Table:
    harmless = f"{load_fields('model_types')['_harmless']} {kind.harmless} model_type"
    direct = {field: f"model.{key}" for key, field in kind.keys.items()}
    same = f"{harmless} {' '.join((*kind.only, *kind.twins, *kind.aliases, *kind.values))} {kind.derived}"
    return replace(load_table("huggingface"), direct=direct, same=same)


def translate(config: Mapping[str, Any], path: Path) -> Translation:
    """Return the overrides of a config.json. Raises UserError for an unsupported model."""
    kind = kind_in(config, path)
    source = Translation(_table(kind), config)
    source.set("model", "pangu_2_6b" if kind.means["kind"] == "pangu" else "gpt2_124m", "model_type")
    known = {name: value for name, value in config.items() if name not in source.unknown}
    keys = read_model(known, path)
    for key, value in keys.items():
        names = (kind.keys[key],) if key in kind.keys else ()
        if isinstance(value, RouterConfig):
            for part, setting in asdict(value).items():
                source.set(f"model.router.{part}", setting)
        elif key != "kind":
            source.set(
                f"model.{key}", asdict(value) if isinstance(value, RopeScaling | LatentConfig) else value, *names
            )
    return source
