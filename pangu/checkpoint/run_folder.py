"""What a run folder keeps: its configuration in config.yaml, its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from pangu.checkpoint.files import list_checkpoints
from pangu.config.build import build
from pangu.config.data import DataConfig
from pangu.config.errors import ConfigError, UserError, writing
from pangu.config.model import ModelConfig
from pangu.config.optimizer import PrecisionConfig
from pangu.config.schema import RunConfig


@dataclass(frozen=True)
class Trained:
    """What a run's configuration says of its model; the names are those of `RunConfig`."""

    model: ModelConfig
    data: DataConfig
    precision: PrecisionConfig


def save_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml. Raises UserError if the folder cannot be written."""
    with writing(folder):
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), encoding="utf-8")


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of the run folder that `path` is; any other path as it is."""
    found = list_checkpoints(path / "checkpoints")
    return found[-1] if found else path


def trained_model(checkpoint: Path) -> Trained:
    """Read config.yaml of the run folder that `checkpoint` (RUN/checkpoints/step-...) is in.

    Other groups of keys are not looked at, so that a model outlives keys that say how it was trained.

    Raises:
        UserError: naming the file, and each key that is missing or wrong.
    """
    path = checkpoint.resolve().parent.parent / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = {field.name: values[field.name] for field in fields(Trained)}
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise UserError(f"{path}: the configuration of the run cannot be read ({error})") from error
    try:
        return build(Trained, known)
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from error
