"""Overrides as words of a command line, and the configuration built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pangu.common.errors import ConfigError, Problem
from pangu.config.build import Wrong, hints_of
from pangu.config.checks import find_problems
from pangu.config.layout_checks import data_size, layout_problems, one_copy
from pangu.config.schema import RunConfig
from pangu.interop.translation.table import UNSAID, Translation
from pangu.models.size import num_parameters
from pangu.training.command import compose

_BARE = re.compile(r"[A-Za-z_][\w.@%+-]*|(?:\.{0,2}/)?[\w.@%+-]+(?:/[\w.@%+-]+)+/?")
"""Texts that Hydra takes without quotes, and as texts."""
_WORDS = ("null", "true", "false", "nan", "inf")


@dataclass(frozen=True)
class Checked:
    """Overrides that a valid configuration was built from."""

    words: list[str]
    """Overrides KEY=VALUE, groups first."""
    parameters: int | None
    """Parameters of the model; None if its shape or vocabulary is still missing."""
    processes: str
    """Description of the number of processes."""


def check(source: Translation, configs: Path) -> Checked:
    """Build the configuration from a translation's overrides; foreign defaults that equal ours are omitted.

    `configs`: folder with base.yaml. Raises ConfigError that names all problems, with the settings they come from.
    """
    groups = sorted(path.name for path in configs.iterdir() if path.is_dir())
    left_open = [key for key in groups if source.overrides.get(key, (None,))[0] == UNSAID]
    chosen = [f"{key}={value}" for key, (value, _) in source.overrides.items() if key in {*groups} - {*left_open}]
    usual = compose(configs, [*chosen, "dry_run=true"])
    stated = {
        key: value
        for key, (value, names) in source.overrides.items()
        if key in groups or source.said(names) or _at(usual, key) != value
    }
    sections = list(hints_of(RunConfig))
    order = sorted(stated, key=lambda key: (key not in groups, sections.index(key.partition(".")[0])))
    words = [f"{key}={hydra_value(stated[key])}" for key in order]
    values = compose(configs, [*(word for word in words if word.partition("=")[0] not in left_open), "dry_run=true"])
    config, problems = find_problems(values)
    problems += [problem for problem in layout_problems(config, world=1) if not isinstance(problem.value, Wrong)]
    if wrong := [_renamed(problem, source) for problem in problems if problem.value != "(missing)"]:
        raise ConfigError(wrong)
    is_whole = "model" in source.overrides and not any(key.startswith("model") for key in source.open)
    missing = any(problem.value == "(missing)" and problem.key.startswith("parallel.") for problem in problems)
    count = 1 if missing else one_copy(config) * data_size(config, 1)
    processes = str(count) if not missing and config.parallel.data else f"a multiple of {count}"
    if (started := source.command.processes) is not None and started % count:
        processes += f" (the script starts {started})"
    return Checked(words, num_parameters(config.model) if is_whole else None, processes)


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
    if not isinstance(value, str) or value == UNSAID or (_BARE.fullmatch(text) and text.lower() not in _WORDS):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"
