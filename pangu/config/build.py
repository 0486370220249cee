"""Construction of the `schema` dataclasses from plain dictionaries, reporting all unknown keys and invalid values."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pangu.common.errors import ConfigError, Problem
from pangu.config.bounds import FREE, Bounds, Encodable
from pangu.config.suggest import close_names

T = TypeVar("T")
RENAMED = {
    "parallel.allowed": "parallel.layouts",
    "parallel.virtual": "parallel.virtual_stages",
    "precision.fp32_products": "precision.fp32_matmul",
    "data.later_weights": "data.weight_schedule",
    "faults.slow_every": "faults.straggler_every",
    "faults.slow_factor": "faults.straggler_factor",
}
"""Old name -> new name, in the same group."""
_MISSING = object()
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", object: "anything"}


class UnusableError(BaseException):
    """Error raised when a rule uses a value that is invalid by itself; `reprlib` would swallow an `Exception`."""


class Wrong:
    """Placeholder for an invalid value: every use raises `UnusableError`, so that rules across keys can still run."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnusableError

    __getattr__ = __str__ = __repr__ = __bool__ = __hash__ = __len__ = __iter__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __int__ = __float__ = __index__ = _refuse


WRONG: Any = Wrong()


def build(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Return the dataclass of group `path` for nested dictionaries. Raises ConfigError that names all wrong ones."""
    built, problems = read(kind, values, path)
    if problems:
        raise ConfigError(problems)
    return built


def read(kind: type[T], values: Mapping[str, Any], path: str = "") -> tuple[T, list[Problem]]:
    """Return the dataclass of group `path` and all problems; invalid values are replaced by `WRONG`. See `build`."""
    problems: list[Problem] = []
    if not path and isinstance(values, Mapping):
        values = with_new_names(values)
    return _Reader(kind, problems).group((kind,), values, path), problems


def read_keys(kind: type, values: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Read some keys of a dataclass, called `names` in messages, and return their values and all problems."""
    problems: list[Problem] = []
    reader, hints = _Reader(kind, problems, texts=False), hints_of(kind)
    return {key: reader.convert(hints[key], value, names[key]) for key, value in values.items()}, problems


def findings(rule: Callable[..., Iterator[Problem]], *arguments: Any) -> list[Problem]:
    """Return the problems that a rule reports before it uses an invalid value."""
    problems = []
    with suppress(UnusableError):
        for problem in rule(*arguments):
            str(problem)  # of a value that is wrong by itself nothing more is said
            problems.append(problem)
    return problems


def keys_of(kind: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all leaf keys of a dataclass, those of every alternative of a union included."""
    for field, hint in hints_of(kind).items():
        nested = [option for option in options_of(hint) if dataclasses.is_dataclass(option)]
        if not nested:
            yield prefix + field
        for option in nested:
            assert isinstance(option, type)
            yield from keys_of(option, f"{prefix}{field}.")


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass with their types, bounds included."""
    return get_type_hints(kind, include_extras=True)


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def tag_of(kind: type) -> tuple[str, str] | None:
    """Return the discriminator of a union member: its first field, if that is a one-word Literal, and the word."""
    field, hint = next(iter(hints_of(kind).items()))
    words = get_args(hint) if get_origin(hint) is Literal else ()
    return (field, words[0]) if len(words) == 1 else None


class _Reader:
    """Converter of values that collects `problems` instead of raising."""

    def __init__(self, root: type, problems: list[Problem], texts: bool = True) -> None:
        """Keep the problem list; with `texts`, numeric texts count as numbers, as YAML 1.1 reads `1e-4` as a text."""
        self._root, self._problems, self._texts = root, problems, texts

    def group(self, options: tuple[Any, ...], values: Any, path: str) -> Any:
        """Return the dataclass for a group of keys, which may be one of several."""
        if not isinstance(values, Mapping):
            return self._wrong(path, values, "must be a group of keys")
        kind = _select(options, values)
        if kind is None:
            tags = _tags(options)
            return self._field(Literal[tuple(word for _, word in tags)], tags[0][0], values, path)
        hints = hints_of(kind)
        for key in values:
            if key not in hints:
                self._wrong(_join(path, str(key)), values[key], *self._unknown(str(key), kind, options, path))
        # a field with a default is younger than the first run folders, whose config.yaml lacks it
        optional = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
        fields = {field: hint for field, hint in hints.items() if field in values or field not in optional}
        return kind(**{field: self._field(hint, field, values, path) for field, hint in fields.items()})

    def _field(self, hint: Any, field: str, values: Mapping[str, Any], path: str) -> Any:
        value = values.get(field, _MISSING)
        if value is _MISSING or (isinstance(value, str) and value == "???"):  # OmegaConf's mark of what has to be given
            self._problems.append(Problem(_join(path, field), "(missing)", f"is required: {describe(hint)}"))
            return WRONG
        return self.convert(hint, value, _join(path, field))

    def _unknown(self, key: str, kind: type, options: tuple[Any, ...], path: str) -> tuple[str, str]:
        """Return the rule and the suggestion for a key that a group does not have."""
        for other in options:
            if key in hints_of(other) and (tag := tag_of(kind)) and (chosen := tag_of(other)):
                rule = f"does not exist with {_join(path, tag[0])} = {tag[1]}"
                return rule, f"set {_option(path, chosen)}, which has it"
        key = key.removeprefix("num_")  # `num_layers` means `layers`, however close it is to `mtp_layers`
        close = difflib.get_close_matches(key, hints_of(kind), n=1, cutoff=0.5)
        is_near = bool(difflib.get_close_matches(key, close, cutoff=0.8))
        elsewhere = [] if is_near else close_names(_join(path, key), keys_of(self._root))
        if (len(elsewhere) <= 2 or not path) and (meant := elsewhere or [_join(path, one) for one in close]):
            return "unknown key", f"did you mean {' or '.join(meant)}?"
        return "unknown key", f"known keys: {', '.join(hints_of(kind))}"

    def convert(self, hint: Any, value: Any, path: str) -> Any:
        """Return `value` as the type `hint`, or `WRONG`."""
        options = options_of(hint)
        if value is None and type(None) in options:
            return None
        optional = type(None) in options
        options = tuple(option for option in options if option is not type(None))
        if all(dataclasses.is_dataclass(option) for option in options):
            if not isinstance(value, Mapping):
                choices = [_option(path, tag) for tag in _tags(options)]
                fix = f"set {' or '.join(choices)}" if len(choices) > 1 else ""
                return self._wrong(path, value, f"must be {describe(hint)}", fix)
            return self.group(options, value, path)
        for option in options:
            built = self._one(option, value, path, optional)
            if built is not _MISSING:
                return built
        return self._wrong(path, repr(value) if isinstance(value, str) else value, f"must be {describe(hint)}")

    def _one(self, option: Any, value: Any, path: str, optional: bool) -> Any:
        bounds: Bounds | Encodable | None = FREE.get(option) if isinstance(option, type) else None
        if get_origin(option) is Annotated:
            option, bounds = get_args(option)
        if get_origin(option) is Literal:
            words = (word for word in get_args(option) if word == value and not isinstance(value, bool))
            return next(words, _MISSING)
        if get_origin(option) is tuple:
            return self._list(get_args(option), value, path)
        if get_origin(option) is dict:
            return dict(value) if isinstance(value, Mapping) else _MISSING
        text = isinstance(value, str) and option is float and not self._texts
        converted: Any = _MISSING if text else _plain(option, value)
        if converted is _MISSING or bounds is None:
            return converted
        rule = bounds.broken(converted)
        if rule is None:
            return converted
        infinite = isinstance(converted, float) and not math.isfinite(converted)
        return self._wrong(path, value if infinite else converted, rule, "use null" if infinite and optional else "")

    def _list(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if not isinstance(value, (list, tuple)) or (kinds[-1] is not Ellipsis and len(kinds) != len(value)):
            return _MISSING
        each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(self.convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(each, value, strict=True)))

    def _wrong(self, path: str, value: Any, rule: str, fix: str = "") -> Any:
        self._problems.append(Problem(path, value, rule, fix))
        return WRONG


def _plain(kind: type, value: Any) -> Any:
    if kind is float:
        return _number(value)
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING
    return value if isinstance(value, kind) else _MISSING


def _select(options: tuple[Any, ...], values: Mapping[str, Any]) -> type | None:
    for option in options:
        tag = tag_of(option)
        # a discriminator that is younger than the first member has its default
        if len(options) == 1 or (tag is not None and values.get(tag[0], getattr(option, tag[0], None)) == tag[1]):
            return option
    return None


def _tags(options: tuple[Any, ...]) -> list[tuple[str, str]]:
    return [tag for option in options if (tag := tag_of(option))]


def _option(path: str, tag: tuple[str, str]) -> str:
    """Return the command-line setting that selects a union member: `optimizer=lamb` or `model.sparse.kind=fixed`."""
    return f"{path}.{tag[0]}={tag[1]}" if "." in path else f"{path}={tag[1]}"


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _MISSING
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats
        return float("inf")
    except ValueError:
        return _MISSING


def describe(hint: Any) -> str:
    """Return the name of a type for messages, without its bounds."""
    words = []
    for option in options_of(hint):
        plain = get_args(option)[0] if get_origin(option) is Annotated else option
        if plain is type(None):
            words.append("null")
        elif get_origin(plain) is Literal:
            words.extend(str(choice) for choice in get_args(plain))
        elif get_origin(plain) is tuple:
            items = get_args(plain)
            size = "" if items[-1] is Ellipsis else f"{len(items)} "
            words.append(f"a list of {size}{_describe_item(items[0])}")
        elif get_origin(plain) is dict or dataclasses.is_dataclass(plain):
            words.append("a group of keys")
        else:
            words.extend(_TYPE_NAMES[plain].split(" or "))
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _describe_item(hint: Any) -> str:
    word = describe(hint)
    article, _, noun = word.partition(" ")
    head, space, rest = noun.partition(" ")
    return f"{head}s{space}{rest}" if article in ("a", "an") else f"the values {word}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def with_new_names(
    values: Mapping[str, Any], given: Sequence[str] = (), note_old: Callable[[str], None] = lambda old: None
) -> dict[str, Any]:
    """Return a configuration with new names for renamed keys, also in the entries of `parallel.layouts`.

    Args:
        values: Nested dictionaries. An old name replaces the value of its new one, which may be a default.
        given: Keys that a command line sets, in this order: a new name after its old one keeps its value.
        note_old: Called with each old name.
    """
    renamed, place = dict(values), {key: number for number, key in enumerate(given)}
    for old, new in RENAMED.items():
        group, _, old_key = old.partition(".")
        keys, new_key = renamed.get(group), new.rpartition(".")[2]
        if isinstance(keys, Mapping) and old_key in keys:
            note_old(old)
            others = {key: value for key, value in keys.items() if key != old_key}
            is_later = place.get(new, -1) > place.get(old, -1)
            renamed[group] = others if is_later and new_key in others else {**others, new_key: keys[old_key]}
    parallel = renamed.get("parallel")
    layouts = parallel.get("layouts") if isinstance(parallel, Mapping) else None
    if isinstance(layouts, (list, tuple)):
        entries = [with_new_names({"parallel": entry}, note_old=note_old)["parallel"] for entry in layouts]
        renamed["parallel"] = {**renamed["parallel"], "layouts": entries}
    return renamed
