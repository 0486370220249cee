"""Checks of another program's configuration: every field is used, known to be harmless, or refused by name.

An ignored field may change the function of the model; converted weights would then load without an error and give wrong
results. Hence fields that a format does not list are refused as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pangu.common.errors import Problem, UserError, shown
from pangu.config.build import read_keys


@cache
def load_table(name: str) -> Any:
    """Return the table of foreign names NAME.yaml in this folder."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))


def check_fields(
    config: Mapping[str, Any],
    where: object,
    used: Iterable[str],
    harmless: Iterable[str],
    only: Mapping[str, Sequence[Any]],
) -> None:
    """Raise a UserError that names every field with which a model would compute a different function.

    Args:
        config: The fields.
        where: Their source, e.g. a file, for the message.
        used: Fields that the format reads and checks.
        harmless: Fields that do not change the function, or patterns of such (`wandb_*`).
        only: Fields that change the function but are not read, with the values that pangu computes.
    """
    names = {*used, *harmless}
    patterns = [name for name in names if "*" in name]
    problems = disagreements(config, only, "is not supported; use {}")
    for key, value in config.items():
        if key not in only and key not in names and not any(fnmatchcase(str(key), pattern) for pattern in patterns):
            rule = "is unknown and may change what the model computes"
            problems.append(Problem(key, value, rule, "remove it from the file if it has no effect"))
    refuse(where, problems)


def read_fields(kind: type, config: Mapping[str, Any], names: Mapping[str, str], where: object) -> dict[str, Any]:
    """Return the keys of a dataclass that fields, called `names`, give; null gives none. Raises UserError."""
    given = {key: config[name] for key, name in names.items() if config.get(name) is not None}
    keys, problems = read_keys(kind, given, names)
    refuse(where, problems)
    return keys


def disagreements(config: Mapping[str, Any], only: Mapping[str, Sequence[Any]], rule: str) -> list[Problem]:
    """Return a problem for each field with a value outside `only`; `rule` has a slot for the allowed values."""
    return [
        Problem(key, config[key], rule.format(" or ".join(dict.fromkeys(map(shown, values)))))
        for key, values in only.items()
        if key in config and not any(_same(config[key], value) for value in values)
    ]


def refuse(where: object, problems: Sequence[Problem]) -> None:
    """Raise a UserError that names all problems of a file, if there are any."""
    if problems:
        raise UserError(f"{where}:\n" + "\n".join(f"  {problem}" for problem in problems))


def wrong_field(where: object, key: str, value: object, rule: str, fix: str = "") -> UserError:
    """Return the error about one field of a file."""
    return UserError(f"{where}:\n  {Problem(key, value, rule, fix)}")


def _same(value: object, expected: object) -> bool:
    """Return whether two plain values are equal; foreign values may be anything, so that `==` alone may raise."""
    if isinstance(expected, list | tuple):
        same_size = isinstance(value, list | tuple) and len(value) == len(expected)
        return same_size and all(map(_same, value, expected))  # type: ignore[call-overload]
    if isinstance(expected, Mapping):
        same_keys = isinstance(value, Mapping) and value.keys() == expected.keys()
        return same_keys and all(_same(value[key], expected[key]) for key in expected)  # type: ignore[index]
    return isinstance(value, bool | int | float | str | None) and value == expected
