"""Configurations for tests, composed from the shipped files as a user's command line composes them."""

from __future__ import annotations

import copy
import threading
from functools import cache, lru_cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from pangu.config.build import build
from pangu.config.schema import RunConfig
from tests.spawn import repository

_COMPOSING = threading.Lock()
"""Hydra composes for one thread at a time."""
RECIPES = sorted(path.stem for path in (repository() / "configs" / "config").glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    """The values that `pretrain.py OVERRIDES` would run from."""
    parsed = [_parsed(override) for override in overrides]
    of_values = [o for o in parsed if "." in o.key_or_group and not (o.is_add() or o.is_delete())]
    others = tuple(str(o.input_line) for o in parsed if o not in of_values)
    with _COMPOSING:
        values = copy.deepcopy(_groups(others))
    for override in of_values:
        OmegaConf.update(values, override.key_or_group, override.value())
    plain = OmegaConf.to_container(values, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@cache
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@cache
def _groups(overrides: tuple[str, ...]) -> DictConfig:
    """Composed once for each choice of files: composing takes longer than a step of a tiny model. Single values, which
    come after the files in Hydra's order too, are left to be set."""
    with initialize_config_dir(str(repository() / "configs"), version_base="1.3"):
        return compose("base", overrides=list(overrides))


@lru_cache(maxsize=64)
def config(*overrides: str) -> RunConfig:
    """The same as frozen dataclasses; once for all ranks that ask for it."""
    return build(RunConfig, composed(*overrides))


def tiny(*overrides: str, kind: str = "pangu") -> RunConfig:
    """A model of a few thousand weights on synthetic tokens, with all that writes or prints switched off."""
    return config(
        f"model={'pangu_quickstart' if kind == 'pangu' else 'gpt2_124m'}",
        "data=synthetic",
        "model.positions=learned",
        "model.layers=3",
        "model.hidden=32",
        "model.heads=4",
        "model.vocab=101",
        "model.sequence=16",
        "batch.global_size=8",
        "batch.micro_size=2",
        "validation.every=0",
        "metrics.tensorboard=false",
        "metrics.wandb=off",
        *overrides,
    )
