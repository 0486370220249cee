"""Configurations for tests, composed from the shipped files as a user's command line composes them."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pangu.config.build import build
from pangu.config.schema import RunConfig
from tests.spawn import repository

RECIPES = sorted(path.stem for path in (repository() / "configs" / "config").glob("*.yaml"))


def composed(*overrides: str) -> dict[str, Any]:
    """The values that `pretrain.py OVERRIDES` would run from."""
    with initialize_config_dir(str(repository() / "configs"), version_base="1.3"):
        values = OmegaConf.to_container(compose("base", overrides=list(overrides)), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def config(*overrides: str) -> RunConfig:
    """The same as frozen dataclasses."""
    return build(RunConfig, composed(*overrides))


def tiny(*overrides: str, kind: str = "pangu") -> RunConfig:
    """A model of a few thousand weights on synthetic tokens, with all that writes or prints switched off."""
    return config(
        f"model={'pangu_quickstart' if kind == 'pangu' else 'gpt2_124m'}",
        "data=synthetic",
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
