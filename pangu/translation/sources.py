"""The formats that are read: a command line or launch script, JSON, YAML or TOML, and config.json."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pangu.config.errors import UserError, reading, shown
from pangu.config.files import parse_json
from pangu.config.flat import flatten
from pangu.translation import deepspeed, huggingface, megatron, mindformers, torchtitan
from pangu.translation.launch_script import after_program, read_command, read_flags
from pangu.translation.table import Translation, load_table

MOST_BYTES, MOST_VALUES = 16 * 2**20, 100_000
"""Of a file with settings."""


def translate(source: str, words: Sequence[str]) -> Translation:
    """The settings that the words of a command line hold or name, as ours. Raises UserError."""
    conditional: Mapping[str, str] = {}
    if source == "megatron":
        given, conditional = _megatron(words)
        rules: Callable[[Translation], None] = megatron.translate
    else:
        if len(words) != 1:
            raise UserError(f"--from {source} needs one file, not {len(words)}")
        path = Path(words[0])
        values = _parsed(path, *_PARSERS[source])
        if source == "huggingface":
            return _not_empty(huggingface.translate(values, path), path)
        with reading(path, ValueError, rule="holds too much"):
            given, rules = flatten(values), _RULES[source]
    translation = _not_empty(Translation(load_table(source), given), words[0])
    translation.conditional = conditional
    rules(translation)
    return translation


def _not_empty(translation: Translation, where: object) -> Translation:
    if not translation.given:
        raise UserError(f"{where}: holds no settings")
    return translation


def _megatron(words: Sequence[str]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Options: those of the command line, or of a script, whose variables NAME=VALUE may follow; and the variables that
    the script sets under a condition."""
    if not words:
        raise UserError("--from megatron needs the options of pretrain_gpt.py, or the path of a launch script")
    if words[0].startswith("--"):
        return read_flags(words), {}
    if behind := after_program(words):
        return read_flags(behind), {}
    path = Path(words[0])
    variables = dict(word.partition("=")[::2] for word in words[1:])
    if wrong := next((word for word in words[1:] if "=" not in word), None):
        raise UserError(f"{shown(wrong)}: behind a launch script stand values of its variables, NAME=VALUE")
    command = read_command(_text(path), path, variables)
    return read_flags(command.words), command.conditional


def _text(path: Path) -> str:
    with reading(path):
        if path.exists() and not path.is_file():  # a named pipe would wait for ever, a device never end
            raise UserError(f"{path}: is no regular file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: has more than {MOST_BYTES // 2**20} MiB, which no file of settings has")
    with reading(path, UnicodeDecodeError, rule="is not UTF-8"):
        return content.decode("utf-8-sig").replace("\r\n", "\n")


def _parsed(path: Path, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = _text(path)
    with reading(path, ValueError, yaml.YAMLError, RecursionError, rule=f"is no {name}"):
        values = parse(text)
    if not isinstance(values, dict):
        raise UserError(f"{path}: is no table of settings")
    return values


def _parse_yaml(text: str) -> Any:
    """Raises ValueError where references stand for more values than a file of settings has, or for endlessly many."""
    values = yaml.safe_load(text)
    left, count = [values], 0
    while left and count <= MOST_VALUES:
        value, count = left.pop(), count + 1
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if left:
        raise ValueError(f"its references stand for more than {MOST_VALUES:,} values")
    return values


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "deepspeed": ("JSON", parse_json),
    "huggingface": ("JSON", parse_json),
    "mindformers": ("YAML", _parse_yaml),
    "torchtitan": ("TOML", tomllib.loads),
}
_RULES: dict[str, Callable[[Translation], None]] = {
    "deepspeed": deepspeed.translate,
    "mindformers": mindformers.translate,
    "torchtitan": torchtitan.translate,
}
SOURCES = ("megatron", *_PARSERS)
