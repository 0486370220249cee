"""What a run folder keeps: its configuration in config.yaml, its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from pangu.checkpoint.files import list_checkpoints, require_fit
from pangu.config.build import build
from pangu.config.data import DataConfig
from pangu.config.errors import ConfigError, UserError, reading, writing
from pangu.config.files import open_regular, refuse_links, write_atomically
from pangu.config.model import ModelConfig
from pangu.config.optimizer import PrecisionConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import logical_shapes


@dataclass(frozen=True)
class Trained:
    """What a run's configuration says of its model; the names are those of `RunConfig`."""

    model: ModelConfig
    data: DataConfig
    precision: PrecisionConfig


_UNREADABLE = "the configuration of the run cannot be read"
MOST_BYTES = 4 * 2**20
"""Of a config.yaml; a larger one would keep Python's reader busy for minutes."""
FOLDERS = ("checkpoints", "data", "plots", "tensorboard", "wandb")
"""Those in a run folder."""


def make_run_folder(output: Path) -> None:
    """Make the folder of a run. Raises UserError if it cannot be written, or if a folder in it or a checkpoint is a
    symbolic link; files are never opened through one."""
    with writing(output):
        refuse_links(output / name for name in FOLDERS)
        refuse_links(sorted(output.glob("checkpoints/step-*")))
        (output / "plots").mkdir(parents=True, exist_ok=True)


def save_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml. Raises UserError if the folder cannot be written."""
    content = yaml.dump(_plain(asdict(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    with writing(folder):
        write_atomically(folder / "config.yaml", content.encode())


def _plain(value: Any) -> Any:
    """Lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """Refuses references to parts of the file: a few lines of them stand for more than the memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("references (*name) are not read here")
        return super().compose_node(parent, index)


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of the run folder that `path` is; any other path as it is."""
    found = list_checkpoints(path / "checkpoints")
    return found[-1] if found else path


def trained_model(checkpoint: Path, index: Mapping[str, Any]) -> Trained:
    """Read config.yaml of the run folder that `checkpoint` (RUN/checkpoints/step-...) is in.

    Other groups of keys are not looked at, so that a model outlives keys that say how it was trained.

    Args:
        checkpoint: its folder.
        index: of it; its weights must be those of the model, so that what is made of the configuration takes no more
            memory than the files.

    Raises:
        UserError: naming the file, and each key that is missing or wrong, or each tensor that does not fit.
    """
    path = checkpoint.resolve().parent.parent / "config.yaml"
    values = _read_yaml(path)
    with reading(path, TypeError, KeyError, rule=_UNREADABLE):
        known = {field.name: values[field.name] for field in fields(Trained)}
    try:
        trained = build(Trained, known)
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from error
    weights = sum(name.startswith("weight/") for name in index["tensors"])
    if trained.model.layers > weights:
        raise UserError(f"{path}: model.layers = {trained.model.layers}: {checkpoint} holds {weights} tensors in all")
    # no heads, or a negative width
    with reading(path, ArithmeticError, RuntimeError, ValueError, rule="the keys of model describe none"):
        shapes = {f"weight/{name}": shape for name, shape in logical_shapes(trained.model).items()}
    require_fit(checkpoint, index, shapes, "weight")
    return trained


def _read_yaml(path: Path) -> Any:
    # ValueError: not UTF-8, or a date that there never was; RecursionError: brackets within brackets
    with reading(path, ValueError, RecursionError, yaml.YAMLError, rule=_UNREADABLE):
        with open_regular(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return yaml.load(content.decode(), _Loader)
