"""Supported formats: a command line or launch script, JSON, YAML or TOML, and transformers' config.json."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from typing import Any

import yaml

from pangu.common.errors import UserError, reading, shown
from pangu.common.files import parse_json, refuse_expanding
from pangu.common.flat import flatten
from pangu.config.model import LatentConfig, RouterConfig
from pangu.config.rope import RopeScaling
from pangu.interop.formats.fields import load_table as load_fields
from pangu.interop.formats.huggingface_config import ModelType, kind_in, read_model
from pangu.interop.translation import deepspeed, megatron, mindformers, torchtitan
from pangu.interop.translation.launch_script import Command, after_program, read_command, read_flags
from pangu.interop.translation.table import Table, Translation, load_table

MOST_BYTES = 16 * 2**20
"""Largest file with settings, bytes."""


def translate(source: str, words: Sequence[str]) -> Translation:
    """Return the translated settings that a command line holds or names. Raises UserError."""
    command = Command([])
    if source == "megatron":
        command = _megatron(words)
        given = read_flags(command.words)
    else:
        if len(words) != 1:
            raise UserError(f"--from {source} needs one file, not {len(words)}")
        path = Path(words[0])
        values = _parsed(path, *_PARSERS[source])
        if source == "huggingface":
            return _not_empty(_translate_config(values, path), path)
        with reading(path, ValueError, rule="is too large"):
            given = flatten(values)
    where = f"{words[0]}: {', '.join(command.empty)} is not set; set it with NAME=VALUE" if command.empty else words[0]
    translation = _not_empty(Translation(load_table(source), given), where)
    translation.command = command
    _RULES[source](translation)
    translation.ask_for_unset()
    return translation


def _table(kind: ModelType) -> Table:
    harmless = f"{load_fields('model_types')['_harmless']} {kind.harmless} model_type"
    direct = {field: f"model.{key}" for key, field in kind.keys.items()}
    same = f"{harmless} {' '.join((*kind.only, *kind.twins, *kind.aliases, *kind.values))} {kind.derived}"
    return replace(load_table("huggingface"), direct=direct, same=same)


def _translate_config(config: Mapping[str, Any], path: Path) -> Translation:
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
            plain = asdict(value) if isinstance(value, RopeScaling | LatentConfig) else value
            source.set(f"model.{key}", plain, *names)
    return source


def _not_empty(translation: Translation, where: object) -> Translation:
    if not translation.given:
        raise UserError(f"{where}: has no settings")
    return translation


def _megatron(words: Sequence[str]) -> Command:
    """Read the options of a command line or script; variables NAME=VALUE may follow a script."""
    if not words:
        raise UserError("--from megatron needs the options of pretrain_gpt.py, or the path of a launch script")
    if words[0].startswith("--"):
        return Command(list(words))
    if PurePath(words[0]).suffix == ".py" or after_program(words):
        return read_command(shlex.join(words), "the command line", {})
    path = Path(words[0])
    variables = dict(word.partition("=")[::2] for word in words[1:])
    if wrong := next((word for word in words[1:] if "=" not in word), None):
        raise UserError(f"{shown(wrong)}: only values for its variables, NAME=VALUE, may follow a launch script")
    return read_command(_text(path), path, variables)


def _text(path: Path) -> str:
    with reading(path):
        if path.exists() and not path.is_file():  # a named pipe would wait for ever, a device never end
            raise UserError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: has more than {MOST_BYTES // 2**20} MiB, too many for a file of settings")
    with reading(path, UnicodeDecodeError, rule="is not UTF-8"):
        return content.decode("utf-8-sig").replace("\r\n", "\n")


def _parsed(path: Path, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    if name == "TOML" and path.suffix in (".py", ".json"):
        rule = "torchtitan is read up to v0.2.2, whose configurations are TOML; later ones are Python and are not read"
        raise UserError(f"{path}: {rule}. --from huggingface config.json translates the model")
    text = _text(path)
    with reading(path, ValueError, yaml.YAMLError, RecursionError, rule=f"is not {name}"):
        values = parse(text)
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a mapping of settings")
    return values


def _parse_yaml(text: str) -> Any:
    values = yaml.safe_load(text)
    refuse_expanding(values)
    return values


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "deepspeed": ("JSON", parse_json),
    "huggingface": ("JSON", parse_json),
    "mindformers": ("YAML", _parse_yaml),
    "torchtitan": ("TOML", tomllib.loads),
}
_RULES: dict[str, Callable[[Translation], None]] = {
    "megatron": megatron.translate,
    "deepspeed": deepspeed.translate,
    "mindformers": mindformers.translate,
    "torchtitan": torchtitan.translate,
}
SOURCES = ("megatron", *_PARSERS)
