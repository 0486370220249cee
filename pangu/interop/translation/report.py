"""Report of a translation for a shell, checked as a configuration, and tables of all mappings for the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pangu.common.errors import ConfigError, Problem, printable, shown
from pangu.config.build import Wrong, hints_of
from pangu.config.checks import find_problems
from pangu.config.layout_checks import data_size, layout_problems, one_copy
from pangu.config.schema import RunConfig
from pangu.interop.formats.huggingface_config import kinds
from pangu.interop.translation.table import UNDECIDED, Table, Translation, load_table
from pangu.models.size import num_parameters
from pangu.training.command import compose

Language = Literal["en", "zh"]
_BARE = re.compile(r"[A-Za-z_][\w.@%+-]*|(?:\.{0,2}/)?[\w.@%+-]+(?:/[\w.@%+-]+)+/?")
"""Texts that Hydra takes without quotes, and as texts."""
_WORDS = ("null", "true", "false", "nan", "inf")
_KEYS = {"en": "| there | here | |", "zh": "| 对方 | 这里 | |"}
_ABSENT = {"en": "| no counterpart | why |", "zh": "| 没有对应项 | 原因 |"}
_DIFFERS = {"en": "Different in effect:", "zh": "效果上的差别："}
_SAME = {"en": "Without effect on what is computed, or not needed here:", "zh": "不影响计算结果，或这里无需给出："}


def describe(source: Translation, configs: Path) -> str:
    """Return overrides to paste after `pretrain.py`, with all other facts for the user as shell comments.

    `configs`: folder with base.yaml. Raises ConfigError that names all problems, with the settings they come from.
    """
    words, size = _checked(source, configs)
    lines = [" \\\n".join(map(shlex.quote, words)), f"# {size}"]
    lines += _section("to be given", source.open)
    unset = {source.shown(name): shown(value) for name, value in source.unset.items() if name not in source.asked}
    lines += _section("not given there", unset)
    lines += _section("not set there, treated as empty", dict.fromkeys(source.command.empty, "set it with NAME=VALUE"))
    if others := source.command.others:
        lines.append(f"# other commands there: {others}; the one with the most options is used")
    conditional = {name: shown(value) for name, value in source.command.conditional.items()}
    lines += _section("set conditionally there, the last value is used", conditional)
    lines += _section("no counterpart", {_named(source, name): text["en"] for name, text in source.absent.items()})
    lines += _section("unknown and left out", {source.shown(n): shown(source.given[n]) for n in source.unknown})
    if source.differences:
        lines.append("# different in effect:")
        lines += [f"#   {source.table.texts[name]['en']}" for name in source.differences]
    return printable("\n".join(lines))


def _checked(source: Translation, configs: Path) -> tuple[list[str], str]:
    """Return overrides KEY=VALUE of a valid configuration, groups first, and the sizes of its model and layout.

    Foreign defaults that equal ours are omitted.
    """
    groups = sorted(path.name for path in configs.iterdir() if path.is_dir())
    left_open = [key for key in groups if source.overrides.get(key, (None,))[0] == UNDECIDED]
    chosen = [f"{key}={value}" for key, (value, _) in source.overrides.items() if key in {*groups} - {*left_open}]
    usual = compose(configs, [*chosen, "dry_run=true"])  # values that need not be stated
    stated = {
        key: value
        for key, (value, names) in source.overrides.items()
        if key in groups or source.is_given(names) or _at(usual, key) != value
    }
    sections = list(hints_of(RunConfig))
    order = sorted(stated, key=lambda key: (key not in groups, sections.index(key.partition(".")[0])))
    words = [f"{key}={hydra_value(stated[key])}" for key in order]
    values = compose(configs, [*(word for word in words if word.partition("=")[0] not in left_open), "dry_run=true"])
    config, problems = find_problems(values)
    # a value that could not be read is a problem already, and no layout
    problems += [problem for problem in layout_problems(config, world=1) if not isinstance(problem.value, Wrong)]
    if wrong := [_renamed(problem, source) for problem in problems if problem.value != "(missing)"]:
        raise ConfigError(wrong)
    # without all keys of the model its size is unknown
    is_whole = "model" in source.overrides and not any(key.startswith("model") for key in source.open)
    missing = any(problem.value == "(missing)" and problem.key.startswith("parallel.") for problem in problems)
    count = 1 if missing else one_copy(config) * data_size(config, 1)
    processes = str(count) if not missing and config.parallel.data else f"a multiple of {count}"
    if (started := source.command.processes) is not None and started % count:
        processes += f" (the script starts {started})"
    size = f"{num_parameters(config.model):,} parameters; " if is_whole else ""
    return words, f"{size}processes: {processes}"


def _at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted name; a new object, which equals nothing, if there is none."""
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return object()
        value = value[part]
    return value


def _renamed(problem: Problem, source: Translation) -> Problem:
    """Return a problem with the settings that the keys' values come from."""
    names = [
        source.shown(name)
        for key in problem.key.split(", ")
        for name in source.overrides.get(key.partition("[")[0], (None, ()))[1]
        if name in source.given
    ]
    return replace(problem, key=f"{problem.key} ({', '.join(names)})") if names else problem


def hydra_value(value: object) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{hydra_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(hydra_value, value))}]"
    text = str(value)
    if not isinstance(value, str) or value == UNDECIDED or (_BARE.fullmatch(text) and text.lower() not in _WORDS):
        return text
    # Hydra takes backslashes literally, except in front of a quote, where each is doubled
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def refusal(source: Translation) -> str | None:
    """Return the message that names the settings whose loss may change the model; None if there are none."""
    lost = [f"  {_named(source, name)}: {why}" for name, why in source.lost.items()]
    count = "1 setting has" if len(lost) == 1 else f"{len(lost)} settings have"
    title = f"{count} no counterpart here, so another model would be trained (--keep-going leaves them out):"
    return printable("\n".join([title, *lost])) if lost else None


def _named(source: Translation, name: str) -> str:
    value = source.given.get(name, source.value(name))
    return source.shown(name) if value is True else f"{source.shown(name)} {shown(value)}"


def _section(title: str, rows: dict[str, str]) -> Iterator[str]:
    if rows:
        yield f"# {title}:"
        yield from (f"#   {name}: {why}" for name, why in rows.items())


def tables(language: Language) -> str:
    """Return the mapping of every program, in Markdown."""
    parts = [_of_program(load_table(name), language) for name in ("megatron", "deepspeed", "mindformers", "torchtitan")]
    return "\n".join([*parts, _of_transformers(language)])


def _of_program(table: Table, language: Language) -> str:
    by_key: dict[str, list[str]] = {}
    for name, key in {**table.direct, **table.read}.items():
        by_key.setdefault(key, []).append(name)
    lines = [f"## {table.title}", "", _KEYS[language], "|---|---|---|"]
    for key, names in by_key.items():
        texts = {table.notes.get(name) for name in names} - {None}
        remark = " ".join(table.texts[str(text)][language] for text in sorted(map(str, texts)))
        lines.append(f"| {_names(table, names)} | {_code(key.split(', '))} | {remark} |")
    lines += ["", _ABSENT[language], "|---|---|"]
    for text, absent in table.absent.items():
        lines.append(f"| {_names(table, absent.split())} | {table.texts[text][language]} |")
    lines += ["", _DIFFERS[language], ""]
    listed = {*table.absent, *table.notes.values(), "value"}
    lines += [f"- {text[language]}" for name, text in table.texts.items() if name not in listed]
    lines += ["", f"{_SAME[language]} {_names(table, table.same.split())}", ""]
    return "\n".join(lines)


def _of_transformers(language: Language) -> str:
    table = load_table("huggingface")
    by_key: dict[str, dict[str, None]] = {}
    for kind in kinds().values():
        for key, field in kind.keys.items():
            by_key.setdefault(f"model.{key}", {})[field] = None
    lines = [f"## {table.title}", "", f"`model_type`: {_code(list(kinds()))}", ""]
    lines += [_KEYS[language], "|---|---|---|"]
    lines += [f"| {_code(list(fields))} | `{key}` | |" for key, fields in by_key.items()]
    lines += ["", _DIFFERS[language], ""]
    lines += [f"- {text[language]}" for text in table.texts.values()]
    return "\n".join([*lines, ""])


def _names(table: Table, names: list[str]) -> str:
    return _code([f"{table.prefix}{name}" for name in names])


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
