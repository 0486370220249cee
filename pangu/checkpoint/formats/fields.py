"""Another program's configuration: every field of it is used, known to be harmless, or refused by its name. An ignored
field may change what the model computes, and the converted weights would load without an error and answer wrongly. So
what a format does not list is refused as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pangu.config.errors import Problem, UserError, shown


@cache
def load_table(name: str) -> Any:
    """The table of foreign names NAME.yaml, beside this file."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))


def check_fields(
    config: Mapping[str, Any],
    where: object,
    used: Iterable[str],
    harmless: Iterable[str],
    only: Mapping[str, Sequence[Any]],
) -> None:
    """Raise a UserError that names every field with which a model would not compute what we compute.

    Args:
        config: the fields.
        where: their source, e.g. a file, for the message.
        used: fields that the format reads and checks.
        harmless: fields that do not change what the model computes, or patterns of such (`wandb_*`).
        only: fields that change it and that the format does not read: the values that mean what we compute.
    """
    names = {*used, *harmless}
    patterns = [name for name in names if "*" in name]
    problems = disagreements(config, only, "is not computed here; {} is")
    for key, value in config.items():
        if key not in only and key not in names and not any(fnmatchcase(str(key), pattern) for pattern in patterns):
            rule = "is not known here and may change what the model computes"
            problems.append(Problem(key, value, rule, "take it out of the file if it changes nothing"))
    refuse(where, problems)


def disagreements(config: Mapping[str, Any], only: Mapping[str, Sequence[Any]], rule: str) -> list[Problem]:
    """Fields that have none of the values of `only`, and the rule, which names these values."""
    return [
        Problem(key, config[key], rule.format(" or ".join(dict.fromkeys(map(shown, values)))))
        for key, values in only.items()
        if key in config and not any(_same(config[key], value) for value in values)
    ]


def refuse(where: object, problems: Sequence[Problem]) -> None:
    """Raise a UserError that names all problems of a file, if there are any."""
    if problems:
        raise UserError(f"{where}:\n" + "\n".join(f"  {problem}" for problem in problems))


def wrong_field(where: object, key: str, value: object, rule: str, works: str = "") -> UserError:
    return UserError(f"{where}:\n  {Problem(key, value, rule, works)}")


def _same(value: object, works: object) -> bool:
    """Whether two plain values are the same. Foreign ones may be anything, so that `==` alone may raise."""
    if isinstance(works, list | tuple):
        same_size = isinstance(value, list | tuple) and len(value) == len(works)
        return same_size and all(map(_same, value, works))  # type: ignore[call-overload]
    if isinstance(works, Mapping):
        same_keys = isinstance(value, Mapping) and value.keys() == works.keys()
        return same_keys and all(_same(value[key], works[key]) for key in works)  # type: ignore[index]
    return isinstance(value, bool | int | float | str | None) and value == works
