"""Mapping of other programs' settings to keys, used for translation and shown by docs/moving-over.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from pangu.common.errors import UserError, shown
from pangu.interop.formats.megatron_experts import expert_interval
from pangu.interop.translation.launch_script import Command

LLAMA: Mapping[str, Any] = {
    **{"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "biases": False, "tied_head": False},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
"""Keys of `ModelConfig` that every Llama has."""
Text = Mapping[str, str]
"""Remark by language of the documentation, `en` and `zh`."""
UNDECIDED = "???"
"""OmegaConf's mark of a value that has to be given."""
_PLACEHOLDER = re.compile(
    r"[$`]|(?<![a-z])your(?![a-z])|(?<![a-z])path[/_ -]to(?![a-z])|^<[^<>]*>|^x{3,}$|\{\{|^(?:\.\.\.|todo|fixme)$"
    r"|(?:change|replace|fill)[_ -]?me|^please |placeholder|你的|填写",
    re.IGNORECASE,
)
"""Placeholders that a user has to fill in, and values that only a shell knows."""


@dataclass(frozen=True)
class Table:
    """Known settings of a program, as SOURCE.yaml in this folder lists them."""

    title: str
    direct: Mapping[str, str]
    """Settings whose value is that of one key."""
    read: Mapping[str, str]
    """Settings that determine keys together or in another form: those keys, for people."""
    absent: Mapping[str, str]
    """Settings without a counterpart, with the name of the reason; names may be patterns."""
    same: str
    """Settings that do not change the function, or have no other value here; names may be patterns."""
    always: Sequence[str]
    """Texts of differences that always apply."""
    texts: Mapping[str, Text]
    """Remarks by name."""
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    """Our values by those of a setting."""
    prefix: str = ""
    """Prefix of names as people write them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Aliases of older versions."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the program that differ from ours."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Required settings of the program: the key that is left open without them."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Translated settings that work differently here, with the name of the explanation."""
    unset: str | None = None
    """Value for "filled in elsewhere" in another program."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of `ModelConfig` of architectures that the program knows by name."""
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that switch a setting without a counterpart off."""
    decisive: Sequence[str] = ()
    """Names of the texts in `absent` whose settings change the model or its training objective."""

    def keys(self, name: str) -> list[str]:
        """Return our keys that a setting decides."""
        listed = self.direct.get(name) or self.read.get(name)
        return listed.split(", ") if listed else []

    def touches_model(self, name: str) -> bool:
        """Return whether a setting decides the model, or which optimizer trains it."""
        is_model = any(key == "optimizer" or key.partition(".")[0] == "model" for key in self.keys(name))
        return is_model or self.why_absent(name) in self.decisive

    def why_absent(self, name: str) -> str | None:
        """Return the reason why a setting has no counterpart; None for others."""
        return next((text for text, names in self.absent.items() if _listed(name, names)), None)


def _listed(name: str, names: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in names.split())


@cache
def load_table(source: str) -> Table:
    """Return the table of SOURCE.yaml."""
    return Table(**yaml.safe_load((Path(__file__).parent / f"{source}.yaml").read_text(encoding="utf-8")))


class Translation:
    """Settings of a file or a command line, and the result of translating each."""

    def __init__(self, table: Table, given: Mapping[str, Any]) -> None:
        """Start with the `given` values by name; texts with unset script variables count as not given."""
        self.table = table
        self.given = {table.aliases.get(name, name): value for name, value in given.items()}
        self.overrides: dict[str, tuple[Any, tuple[str, ...]]] = {}
        """Values of our keys, with the settings that they come from."""
        self.absent: dict[str, Text] = {}
        """Settings without a counterpart, with the reason."""
        self.unset = {n: value for n, value in self.given.items() if _is_unset(value, table.unset)}
        """Settings whose value is unknown: placeholders, unset variables, `auto`."""
        self.open: dict[str, str] = {}
        """Keys that the user has to give, with the reason."""
        self.asked: set[str] = set()
        """Settings without a value that left a key open."""
        self.command = Command([])
        """Command that a script starts, if the settings are its options."""
        self.differences: list[str] = list(table.always)
        """Names of texts about differences."""
        known = {**table.defaults, **self.given}
        self._values = {name: value for name, value in known.items() if name not in self.unset}
        for name, value in self.given.items():
            asks = value and value not in table.neutral.get(name, ())
            if asks and (why := table.why_absent(name)) and not table.keys(name):
                self.lacks(name, why)
            if note := table.notes.get(name):
                self.differs(note)
        for name, key in table.required.items():
            if name not in self._values:
                self.needs(key, f"{self.shown(name)} is not given")

    @property
    def unknown(self) -> list[str]:
        """Unknown settings."""
        table = self.table
        return [
            name
            for name, value in self.given.items()
            if not (value is None or table.keys(name) or table.why_absent(name) or _listed(name, table.same))
        ]

    @property
    def lost(self) -> dict[str, str]:
        """Settings that change the model, or may change it, and have no effect here, with the reason."""
        absent = {name: text["en"] for name, text in self.absent.items() if self.table.touches_model(name)}
        return {**absent, **dict.fromkeys(self.unknown, "is unknown, and may change the model")}

    def shown(self, name: str) -> str:
        """Return a setting as it was given."""
        return f"{self.table.prefix}{name}"

    def value(self, name: str) -> Any:
        """Return a setting as given, or the program's default; None for neither."""
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        """Return a number. Raises UserError for anything else."""
        value = self.value(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.wrong(name, "must be a number") from None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)):
            raise self.wrong(name, "must be a number")
        return value

    def integer(self, name: str) -> int | None:
        """Return an integer. Raises UserError for anything else."""
        value = self.number(name)
        if value is not None and (isinstance(value, float) and not value.is_integer()):
            raise self.wrong(name, "must be an integer")
        return None if value is None else int(value)

    def real(self, name: str) -> float | None:
        """Return a number as a float."""
        value = self.number(name)
        return None if value is None else float(value)

    def count(self, name: str) -> int | None:
        """Return an integer used as a divisor. Raises UserError if it is below 1."""
        value = self.integer(name)
        if value is not None and value < 1:
            raise self.wrong(name, "must be at least 1")
        return value

    def text(self, name: str) -> str | None:
        """Return a text. Raises UserError for lists and tables."""
        value = self.value(name)
        if isinstance(value, list | Mapping):
            raise self.wrong(name, "must be a single value")
        return None if value is None else str(value)

    def flag(self, name: str) -> bool:
        """Return a truth value. Raises UserError for anything else."""
        value = self.value(name)
        if value not in (None, True, False):
            raise self.wrong(name, "must be true or false")
        return value is True

    def words(self, name: str) -> list[str]:
        """Return a list of texts, also for a single one."""
        value = self.value(name)
        return [] if value is None else [str(one) for one in (value if isinstance(value, list) else [value])]

    def wrong(self, name: str, rule: str) -> UserError:
        """Return the error about a setting."""
        return UserError(f"{self.shown(name)} = {shown(self.value(name))}: {rule}")

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key to a value from settings `names`; without names it is the program's behavior."""
        self.overrides[key] = value, names

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value that a key has been set to."""
        return self.overrides.get(key, (default, ()))[0]

    def copy(self, read: Callable[[str], Any], *names: str) -> None:
        """Set the keys of settings to their values as a method of this class reads them, if there are any."""
        for name in names:
            if (value := read(name)) is not None:
                self.set(self.table.keys(name)[0], value, name)

    def switch(self, value: Any, name: str) -> None:
        """Set the key of a setting to a value if the setting is on."""
        if self.flag(name):
            self.set(self.table.keys(name)[0], value, name)

    def choose(self, name: str) -> None:
        """Set the key of a setting to the translation of its value (`Table.values`), which may have no counterpart."""
        value, known = self.value(name), self.table.values[name]
        if name in self.unset:
            return
        if isinstance(value, list | Mapping) or value not in known:
            self.lacks(name, "value")
        else:
            self.set(self.table.keys(name)[0], known[value], name)

    def set_expert_layers(self, pattern: Sequence[int], name: str, *dense: str) -> None:
        """Set the keys of a pattern of expert layers (0 or 1) that setting `name`, perhaps with `dense`, describes."""
        if (found := expert_interval(pattern)) is None:
            self.lacks(name, "value")
        else:
            self.set("model.dense_layers", found[0], name, *dense)
            self.set("model.expert_every", found[1], name)

    def lacks(self, name: str, text: str) -> None:
        """Note that a setting, or its value, has no counterpart."""
        self.absent.setdefault(name, self.table.texts[text])

    def differs(self, text: str) -> None:
        """Note that something works differently here."""
        if text not in self.differences:
            self.differences.append(text)

    def needs(self, key: str, why: str) -> None:
        """Leave a key open that the settings do not determine; the run will ask for it."""
        self.overrides[key] = UNDECIDED, ()
        self.open[key] = why

    def ask_for_unset(self) -> None:
        """Leave open the first key of each setting that has no value yet, unless another setting decides it."""
        for name, value in self.unset.items():
            for key in self.table.keys(name)[:1]:
                decided, names = self.overrides.get(key, (UNDECIDED, ()))
                before = names[: names.index(name)] if name in names else names
                others = [other for other in before if other in self.given and other not in self.unset]
                # of a switch it is enough that it is given
                if decided == UNDECIDED or (name in names and decided is not True and not others):
                    self.needs(key, f"{self.shown(name)} is {shown(value)}")
                    self.asked.add(name)

    def set_direct(self) -> None:
        """Translate all settings whose value is that of one key."""
        for name, key in self.table.direct.items():
            value = self.value(name)
            if isinstance(value, str) and re.match(r"[-+]?[\d.]", value):  # YAML 1.1 reads `1e-8` as a text
                with suppress(ValueError):
                    value = float(value)
            if value is not None:
                self.set(key, value, name)

    def is_given(self, names: Sequence[str]) -> bool:
        """Return whether one of these settings is given, rather than a default of the program."""
        return any(name in self.given for name in names)

    def blend(self, name: str) -> tuple[list[str], list[float]]:
        """Return the paths of a blend, `0.7 A 0.3 B`, and their weights, which may be omitted."""
        words = self.words(name)
        try:
            weights = [float(word) for word in words[::2]]
        except ValueError:
            return words, []
        return (words[1::2], weights) if len(words) % 2 == 0 else (words, [])


def _is_unset(value: Any, mark: str | None) -> bool:
    if isinstance(value, list):
        joined = " ".join(one for one in value if isinstance(one, str))
        return _PLACEHOLDER.search(joined) is not None or any(_is_unset(one, mark) for one in value)
    return isinstance(value, str) and (value == mark or _PLACEHOLDER.search(value) is not None)
