"""Text of `pretrain.py --help`: the groups of keys, and each key with its type and its docstring.

Read from the sources of the dataclasses, so that help needs neither torch nor Hydra.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pangu.common.commands import as_typed
from pangu.common.errors import UserError, shown
from pangu.common.exit_status import exit_status
from pangu.config.build import describe, hints_of, options_of, tag_of
from pangu.config.schema import RunConfig
from pangu.config.suggest import close_names

WIDTH = 120
_OVERVIEW = """\
pangu trains GPT and PanGu-α language models.

  python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart
  python scripts/launch.py --nproc-per-node=8 pretrain.py +config=gpt2_124m data.train=[/data/web] validation.every=0
  python pretrain.py +config=pangu_13b dry_run=true             checks and plans, without devices
  python pretrain.py +config=pangu_13b optimizer=lamb --cfg job   shows all values of a configuration

scripts/launch.py accepts torchrun's options; torchrun can be used instead.

Options of groups: GROUP=OPTION chooses one, GROUP=FILE.yaml a file of your own, +config=RECIPE a whole recipe.
{options}

Groups of keys: GROUP.KEY=VALUE sets one, after recipes and options.
{groups}

  --help GROUP     explains the keys of a group, e.g. --help model
  --help KEY       explains one, e.g. --help model.window
  --help all       explains all"""


START = """\
no configuration given. To start:

  python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart
      trains a small model on the sources of Python, in a few minutes on a CPU
  python pretrain.py +config=gpt2_124m data.train=[/data/web] validation.every=0
      trains a recipe on your own text files
  python pretrain.py +config=pangu_13b dry_run=true
      checks and plans a run, without devices
  python pretrain.py --help
      shows all recipes and keys"""


def show_help(words: Sequence[str], configs: Path) -> bool:
    """Print help if the command line asks for it and return whether it does; end the process if there are no words."""
    if not words:

        def refuse() -> None:
            raise UserError(START)

        sys.exit(exit_status(refuse))
    if not {"--help", "-h"} & set(words):
        return False
    names = [word.partition("=")[0] for word in words if not word.startswith(("-", "+"))]
    if status := exit_status(lambda: print("\n\n".join(map(explain, names)) if names else overview(configs))):
        sys.exit(status)
    return True


def overview(configs: Path) -> str:
    """Return the help page with the command, the options of each group, and the groups of keys."""
    folders = sorted(path for path in configs.iterdir() if path.is_dir())
    options = [(folder.name, ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))) for folder in folders]
    groups = [(name, docstrings(RunConfig)[name]) for name in hints_of(RunConfig)]
    return as_typed(_OVERVIEW).format(options=_columns(options), groups=_columns(groups))


class Entry(NamedTuple):
    """Key, or group of keys, with its explanation."""

    name: str
    type: str
    text: str
    when: str = ""
    """Alternatives of a union that have the key; empty: all have it."""
    is_group: bool = False


def explain(name: str) -> str:
    """Return names, types and docstrings of a group of keys, of one key, or of `all`. Raises UserError if unknown."""
    known, name = list(entries(RunConfig)), re.sub(r"\[\d+\]", "[]", name)
    below = (f"{name}.", f"{name}[].")
    chosen = [one for one in known if name == "all" or one.name == name or one.name.startswith(below)]
    if not chosen:
        near = close_names(name, [one.name for one in known])
        fix = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(hints_of(RunConfig))}"
        raise UserError(f"{name}: unknown group or key; {fix}")
    return "\n\n".join(_paragraph(f"{one.name}: {one.type}{one.when and f' [{one.when}]'}", one.text) for one in chosen)


def reference(defaults: Mapping[str, object]) -> str:
    """Return a Markdown table of keys for each group of the configuration. `defaults`: values by dotted name."""
    parts = []
    for entry in entries(RunConfig):
        group, _, key = entry.name.partition(".")
        if not key:
            parts.append(f"\n## {group}\n\n{entry.text}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        if not entry.is_group:
            default = f"`{shown(defaults[entry.name])}`" if entry.name in defaults else ""
            when = f"With `{entry.when}`: " if entry.when else ""
            cells = (f"`{entry.name}`", entry.type, default, when + " ".join(entry.text.split()))
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(parts)


def entries(kind: type, path: str = "") -> Iterator[Entry]:
    """Yield every key below a dataclass; groups come before their keys."""
    for field, hint in hints_of(kind).items():
        name, text = f"{path}{field}", docstrings(kind)[field]
        groups = [option for option in options_of(hint) if dataclasses.is_dataclass(option)]
        if not groups:
            yield Entry(name, type_in_words(hint), text)
            items = [get_args(option)[0] for option in options_of(hint) if get_origin(option) is tuple]
            for item in items:
                if isinstance(item, type) and dataclasses.is_dataclass(item):
                    yield from entries(item, f"{name}[].")
        found: dict[str, dict[str, list[Entry]]] = {}
        for group in groups:
            assert isinstance(group, type)
            tag = tag_of(group)
            when = f"{name}.{tag[0]} = {tag[1]}" if tag and len(groups) > 1 else ""
            own = Entry(name, describe(hint), inspect.getdoc(group) or text, is_group=True)
            for entry in (own, *entries(group, f"{name}.")):
                found.setdefault(entry.name, {}).setdefault(when, []).append(entry)
        for alternatives in found.values():
            first, *others = alternatives.values()
            if len(alternatives) == len(groups) and all(other == first for other in others):
                yield from first
                continue
            for when, several in alternatives.items():
                for entry in several:
                    yield entry._replace(when=", ".join(filter(None, (when, entry.when))))


def type_in_words(hint: Any) -> str:
    """Return a type with its bounds as text, e.g. `an integer or null; at least 1`."""
    each = [get_args(option)[0] for option in options_of(hint) if get_origin(option) is tuple]
    bounds = [str(get_args(option)[1]) for option in options_of(hint) if get_origin(option) is Annotated]
    bounds += [f"each {get_args(item)[1]}" for item in each if get_origin(item) is Annotated]
    return "; ".join([describe(hint), *bounds])


@cache
def docstrings(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by field name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            texts[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return texts


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    indent = " " * (width + 2)
    return "\n".join(
        textwrap.fill(f"  {name:<{width}}{text}", WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        for name, text in rows
    )


def _paragraph(head: str, text: str) -> str:
    body = textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    return f"{head}\n{body}"
