"""Report of a translation for a shell, and the tables of all mappings for the documentation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

from pangu.common.errors import printable, shown
from pangu.interop.formats.huggingface_config import kinds
from pangu.interop.translation.checked import Checked
from pangu.interop.translation.table import Table, Translation, load_table

Language = Literal["en", "zh"]


_KEYS = {"en": "| there | here | |", "zh": "| 对方 | 这里 | |"}
_ABSENT = {"en": "| no counterpart | why |", "zh": "| 没有对应项 | 原因 |"}
_DIFFERS = {"en": "Different in effect:", "zh": "效果上的差别："}
_SAME = {"en": "Without effect on what is computed, or not needed here:", "zh": "不影响计算结果，或这里无需给出："}


def describe(source: Translation, checked: Checked) -> str:
    """Return overrides to paste after `pretrain.py`, with all other facts for the user as shell comments."""
    lines = [" \\\n".join(shlex.quote(word) for word in checked.words)]
    if checked.parameters is not None:
        lines.append(f"# {checked.parameters:,} parameters; processes: {checked.processes}")
    else:
        lines.append(f"# processes: {checked.processes}")
    lines += _section("to be given", source.open)
    not_told = {source.shown(name): shown(value) for name, value in source.unset.items() if name not in source.asked}
    lines += _section("not given there", not_told)
    lines += _section("not set there, treated as empty", dict.fromkeys(source.command.empty, "set it with NAME=VALUE"))
    if others := source.command.others:
        lines.append(f"# other commands there: {others}; the one with most options is used")
    conditional = {name: shown(value) for name, value in source.command.conditional.items()}
    lines += _section("set under a condition there, the last value is used", conditional)
    lines += _section("no counterpart", {_named(source, name): text["en"] for name, text in source.absent.items()})
    lines += _section("unknown, and left out", {source.shown(n): shown(source.given[n]) for n in source.unknown})
    if source.differences:
        lines.append("# different in effect:")
        lines += [f"#   {source.table.texts[name]['en']}" for name in source.differences]
    return printable("\n".join(lines))


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
