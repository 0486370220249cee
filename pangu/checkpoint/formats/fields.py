"""Another program's configuration: every field of it is used, known to be harmless, or refused by its name.

A field that is passed over may change what the model computes, and the converted weights would then load without an
error and answer wrongly. So nothing is passed over: what a format does not list is refused as well.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pangu.config.errors import Problem, UserError

_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxstring = 120


def check_fields(
    config: Mapping[str, Any],
    where: object,
    used: Collection[str],
    harmless: Collection[str],
    only: Mapping[str, Sequence[Any]],
) -> None:
    """Raise unless a model with these fields computes what we compute.

    Args:
        config: the fields.
        where: what they come from, a file for instance; stands at the head of the message.
        used: fields that the format reads, whatever their value; it judges them itself.
        harmless: fields that do not change what the model computes, or patterns of such (`wandb_*`).
        only: fields that change it and that the format does not read: the values that mean what we compute.

    Raises:
        UserError: naming every field with another value, and every field in none of the three.
    """
    names = {name for name in harmless if "*" not in name}
    patterns = [name for name in harmless if "*" in name]
    problems = []
    for key, value in config.items():
        if key in only:
            if not any(_same(value, works) for works in only[key]):
                works = " or ".join(dict.fromkeys(shown(value) for value in only[key]))
                problems.append(Problem(shown(key), shown(value), "is not computed here", f"{works} is"))
        elif key not in used and key not in names and not any(fnmatchcase(str(key), pattern) for pattern in patterns):
            rule = "is not known here and may change what the model computes"
            problems.append(Problem(shown(key), shown(value), rule, "take it out of the file if it changes nothing"))
    refuse(where, problems)


def disagreements(config: Mapping[str, Any], tensors: Mapping[str, Sequence[Any]]) -> list[Problem]:
    """Fields that contradict the tensors; `tensors` has the values that those allow."""
    return [
        Problem(key, shown(config[key]), f"does not agree with the tensors; {shown(values[0])} does")
        for key, values in tensors.items()
        if key in config and not any(_same(config[key], value) for value in values)
    ]


def refuse(where: object, problems: Sequence[Problem]) -> None:
    """Raise a UserError that names all problems of a file, if there are any."""
    if problems:
        raise UserError(f"{where}:\n" + "\n".join(f"  {problem}" for problem in problems))


def shown(value: object) -> str:
    """A foreign name or value in a message: one short line, control characters escaped."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _SHORT.maxstring:
        return value
    return _SHORT.repr(value)


def _same(value: object, works: object) -> bool:
    """Are two plain values the same? Foreign ones may be anything, so that `==` alone may raise."""
    if isinstance(works, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(works)
            and all(_same(a, b) for a, b in zip(value, works, strict=True))
        )
    if isinstance(works, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == works.keys()
            and all(_same(value[k], works[k]) for k in works)
        )
    return isinstance(value, bool | int | float | str | None) and value == works
