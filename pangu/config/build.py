"""Builds the frozen dataclasses of `schema` from plain dictionaries; names every unknown key and wrong type at once."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pangu.config.errors import ConfigError, Problem

T = TypeVar("T")
_MISSING = object()
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a `kind` (a dataclass of `schema`) from nested dictionaries.

    Raises:
        ConfigError: with one line for every unknown key, missing key and value of the wrong type.
    """
    problems: list[Problem] = []
    built = _build_dataclass(kind, values, "", problems)
    if problems:
        raise ConfigError(problems)
    return built


def keys_of(kind: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaf keys of a dataclass; every alternative of a union contributes its own."""
    for field, hint in get_type_hints(kind).items():
        nested = [option for option in _options(hint) if dataclasses.is_dataclass(option)]
        if not nested:
            yield prefix + field
        for option in nested:
            assert isinstance(option, type)
            yield from keys_of(option, f"{prefix}{field}.")


def _options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _build_dataclass(kind: type, values: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(values, Mapping):
        problems.append(Problem(path, values, "must be a group of keys"))
        return None
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.5)
            works = f"did you mean {_join(path, close[0])}?" if close else f"known keys: {', '.join(hints)}"
            problems.append(Problem(_join(path, str(key)), values[key], "there is no such key", works))
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    arguments = {}
    for field, hint in hints.items():
        value = values.get(field, _MISSING)
        if isinstance(value, str) and value == "???":
            value = _MISSING  # OmegaConf's mark of a value that has to be given
        if value is _MISSING and defaults[field] is not dataclasses.MISSING:
            value = defaults[field]
        if value is _MISSING:
            problems.append(Problem(_join(path, field), "(missing)", f"must be given: {_describe(hint)}"))
        else:
            arguments[field] = _convert(hint, value, _join(path, field), problems)
    return kind(**arguments) if len(arguments) == len(hints) else None


def _convert(hint: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    """`value` as the type that `hint` asks for; appends to `problems` where that is not possible."""
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if all(dataclasses.is_dataclass(option) for option in options):
        return _build_dataclass(_select(options, value), value, path, problems)
    for option in options:
        built = _convert_one(option, value, path, problems)
        if built is not _MISSING:
            return built
    problems.append(Problem(path, repr(value) if isinstance(value, str) else value, f"must be {_describe(hint)}"))
    return None


def _convert_one(option: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    """`value` as one alternative of a union; `_MISSING` where it does not fit."""
    if get_origin(option) is Literal:
        if value in get_args(option) and not isinstance(value, bool):
            return value
    elif get_origin(option) is tuple:
        items = get_args(option)
        if isinstance(value, (list, tuple)) and (items[-1] is Ellipsis or len(items) == len(value)):
            kinds = [items[0]] * len(value) if items[-1] is Ellipsis else items
            return tuple(
                _convert(k, v, f"{path}[{i}]", problems) for i, (k, v) in enumerate(zip(kinds, value, strict=True))
            )
    elif get_origin(option) is dict:
        if isinstance(value, Mapping):
            return {str(k): _convert(get_args(option)[1], v, f"{path}.{k}", problems) for k, v in value.items()}
    elif option is float:
        number = _number(value)
        if number is not None:
            return number
    elif option is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, option):
        return value
    return _MISSING


def _select(options: tuple[Any, ...], value: Any) -> type:
    """The dataclass of a union whose tag (its first field, a one-word Literal) equals the value's."""
    for option in options:
        tag, hint = next(iter(get_type_hints(option).items()))
        if isinstance(value, Mapping) and get_origin(hint) is Literal and value.get(tag) in get_args(hint):
            return option
    return options[0]


def _number(value: Any) -> float | None:
    """YAML 1.1 reads `1e-4` as a text, so texts that are numbers count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _describe(hint: Any) -> str:
    words = []
    for option in _options(hint):
        if option is type(None):
            words.append("null")
        elif get_origin(option) is Literal:
            words.extend(str(choice) for choice in get_args(option))
        elif get_origin(option) is tuple:
            items = get_args(option)
            size = "" if items[-1] is Ellipsis else f"{len(items)} "
            words.append(
                f"a list of {size}{_describe(items[0])} values".replace("a number", "number").replace("a text", "text")
            )
        elif get_origin(option) is dict or dataclasses.is_dataclass(option):
            words.append("a group of keys")
        else:
            words.append(_TYPE_NAMES[option])
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
