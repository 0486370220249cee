"""Command line that a launch script passes to Megatron-LM's pretrain_gpt.py, read without running the script.

Shell features are emulated as far as such scripts need them: variables, arrays, quotes, continued lines, comments,
`${NAME:-default}` and integer arithmetic. Facts of the run itself (`$1`, `$(hostname)`, the environment) stay in the
text unchanged.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pangu.common.errors import UserError, reading, shown

MOST_CHARACTERS = 1_000_000
"""Largest script and variable: a variable that contains itself twice doubles with each line."""
MOST_WORDS = 20_000
"""Largest number of words in a command."""
_OUTPUT = r"\$\((?>(?:[^()]|\([^()]*+\))*)\)"
_QUOTED = rf"""'[^']*+'|"(?>(?:\\.|{_OUTPUT}|[^"\\])*)\""""
_SUM = r"(?>(?:[^()\n]|\([^()\n]*+\))*)"
_EXPANDED = rf"\$\(\({_SUM}\)\)|{_OUTPUT}|`[^`]*+`|\$\{{[^}}\n]{{0,300}}+\}}"
_TOKEN = re.compile(
    rf"(?P<space>(?>(?:[ \t\r]|\\\n)+))|(?P<comment>#[^\n]*+)|(?P<mark>[;\n|&()]|\d*[<>])"
    rf"|(?P<word>(?>(?:\\.|{_QUOTED}|{_EXPANDED}|[^\s'\"\\;|&<>()`]|(?<==)<[^<>\n]*+>)+))|(?P<wrong>.)",
    re.DOTALL,
)
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_PIECE = re.compile(rf"(?P<quoted>{_QUOTED})|(?P<escape>\\.)|(?P<plain>(?>(?:{_EXPANDED}|[^'\"\\])+))", re.DOTALL)
_DEFAULT = r"(?>(?:\$\{(?>(?:\$\{[^{}]*+\}|[^{}])*)\}|[^{}])*)"
"""Pattern of a variable's default, with nested defaults, two levels deep."""
_VARIABLE = re.compile(
    rf"\$\(\((?P<sum>{_SUM})\)\)"
    rf"|\$\{{(?P<name>\w+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>{_DEFAULT}))?\}}|\$(?P<bare>[A-Za-z_]\w*|\d)"
)
_ARRAY = re.compile(r"\$\{(\w+)\[@\]\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BEFORE = ("export", "local", "declare", "readonly", "then", "else", "do", "{")
"""Words that a command or an assignment may follow."""
_PROGRAM, _SCRIPT = re.compile(r"pretrain_gpt2?\.py"), re.compile(r"\w[\w.-]*\.py")
_NODES = re.compile(r"--?(?:nnodes|num_nodes)[ =](\S+)")
_OF_EACH = re.compile(r"--?(?:nproc[-_]per[-_]node|num_gpus)[ =](\S+)")
_SLURM_NODES = re.compile(r"^#SBATCH[ \t]+(?:--nodes[= ]|-N[= ]?)(\d+)", re.MULTILINE)
_SLURM_TASKS = re.compile(r"^#SBATCH[ \t]+--ntasks-per-node[= ](\d+)", re.MULTILINE)
_OPTIONS = re.compile(
    r"\$\{?(\w*(?:ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS|PARAMS)\w*|[@*])(?:\[[@*]\])?(?::\d)?\}?", re.IGNORECASE
)
"""Variables named after options that they hold. A shell replaces unset ones by nothing."""
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
"""Words that begin and end conditional or repeated commands."""


class Variables(dict[str, list[str]]):
    """Values of variables, with a bound on their size: one that grows with each line is quadratic."""

    written = 0

    def __setitem__(self, name: str, value: list[str]) -> None:
        """Store a value and count its size."""
        self.count(value)
        super().__setitem__(name, value)

    def count(self, value: Sequence[str]) -> None:
        """Count the characters and words of a value. Raises ValueError if a script takes too many."""
        self.written += len(value) + sum(map(len, value))
        if self.written > 10 * MOST_CHARACTERS:
            raise ValueError(f"its variables have more than {10 * MOST_CHARACTERS:,} characters together")


class Command(NamedTuple):
    """Command that a script starts."""

    words: list[str]
    """Words after pretrain_gpt.py."""
    conditional: Mapping[str, str] = {}
    """Variables that the script sets under a condition, with their last value: conditions are not evaluated."""
    empty: Sequence[str] = ()
    """Variables with options that the script uses and does not set."""
    processes: int | None = None
    """Number of processes on all nodes, if the launcher's options or Slurm's say it."""
    others: int = 0
    """Number of commands with pretrain_gpt.py and other options that the script starts, e.g. under a condition."""


def read_command(text: str, where: object, given: Mapping[str, str]) -> Command:
    """Return the command with pretrain_gpt.py and most options; `given` variables override those of the script.

    Raises UserError if there is no such command, quotes do not match, or a variable grows too large.
    """
    nodes = _SLURM_NODES.search(text)
    known = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes[1]) if nodes else {}
    variables = Variables({name: [value] for name, value in {**known, **given}.items()})
    chosen: list[str] = []
    options: list[str] = []
    commands: set[frozenset[str]] = set()
    others: dict[str, None] = {}
    conditional: list[str] = []
    depth = 0
    with reading(where, ValueError, rule="cannot be followed"):
        for words, mark in _statements(text):
            while words and words[0] in (*_BEFORE, *_OPENS, *_CLOSES):
                depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
                words = words[1:]
            for command in _commands(words, variables, given, conditional if depth > 0 or mark in "&|" else []):
                others.update(dict.fromkeys(_scripts(command)))
                if len(following := after_program(command)) > len(options):
                    chosen, options = command, following
                commands.add(frozenset(following))
    if not options:
        others.pop("pretrain_gpt.py", None)
        found = f"it starts another program, {', '.join(list(others)[:5])}" if others else ""
        raise UserError(f"{where}: no command that runs pretrain_gpt.py with options{found and f'; {found}'}")
    values = {name: " ".join(variables[name]) for name in conditional if name not in given}
    empty = [match[1] for word in options if (match := _OPTIONS.fullmatch(word))]
    kept = [word for word in options if not _OPTIONS.fullmatch(word)]
    different = sum(not command <= set(options) for command in commands)
    return Command(kept, values, empty, _processes(chosen[: -len(options)], text), different)


def _processes(launcher: Sequence[str], text: str) -> int | None:
    """Return how many processes a launcher's words start on all nodes; without any, Slurm's tasks."""
    line = " ".join(launcher)
    if per_node := _OF_EACH.search(line):
        counts = [per_node[1], nodes[1] if (nodes := _NODES.search(line)) else "1"]
    else:
        counts = [match[1] for pattern in (_SLURM_TASKS, _SLURM_NODES) if (match := pattern.search(text))]
    if len(counts) == 2 and all(re.fullmatch(r"[1-9]\d{0,6}", count) for count in counts):
        return int(counts[0]) * int(counts[1])
    return None


def _commands(
    words: list[str], variables: Variables, given: Mapping[str, str], names: list[str]
) -> Iterator[list[str]]:
    """Run a statement's assignments, adding `names`; yield values and other words that start a Python script."""
    while words and (assigned := _ASSIGNMENT.match(words[0])):
        count = _assign(words, assigned, variables, given)
        names.append(assigned[1])
        value = [part for value in variables[assigned[1]] for part in value.split()]
        if any(_scripts(value)):
            yield value
        words = words[count:]
    rest = [field for word in words if word != "(" for field in expand(word, variables)]
    _check_words(rest)
    for line in (rest, *(field.split() for field in rest if " " in field)):
        if any(_scripts(line)):
            yield line


def _check_words(words: Sequence[str]) -> None:
    if len(words) > MOST_WORDS:
        raise ValueError(f"a command has more than {MOST_WORDS:,} words")


def _scripts(words: Sequence[str]) -> list[str]:
    names = [PurePosixPath(word.strip("'\"")).name for word in words if ".py" in word]
    return [name for name in names if _SCRIPT.fullmatch(name)]


def after_program(words: Sequence[str]) -> list[str]:
    """Return the words after pretrain_gpt.py; none if it is not there."""
    places = [n for n, word in enumerate(words) if _PROGRAM.fullmatch(PurePosixPath(word.strip("'\"")).name)]
    return [word.strip("'\"") for word in words[places[0] + 1 :]] if places else []


def _statements(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield each command's quoted words, arrays in `(` and `)`, and the mark before it (`&` also for `&&`)."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS:,} characters")
    text = _without_documents(text)
    words: list[str] = []
    inside, mark = False, "\n"
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "wrong":
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(f"line {line}: the quotation mark {token[0]} does not end")
        _check_words(words)
        if token.lastgroup == "word":
            words.append(token[0])
        elif token[0] == "(" and words and words[-1].endswith("="):
            inside = True
            words.append("(")
        elif token[0] == ")" and inside:
            inside = False
            words.append(")")
        elif token.lastgroup == "mark" and not inside:
            if words:
                yield words, mark
            words, mark = [], token[0]
    if words:
        yield words, mark


def _without_documents(text: str) -> str:
    """Empty the lines of here-documents."""
    lines = text.split("\n")
    last, end = {line.strip(): number for number, line in enumerate(lines)}, ""
    for number, line in enumerate(lines):
        if end:
            lines[number], end = "", "" if line.strip() == end else end
        elif (document := _HERE.search(line)) and last.get(document[2], -1) > number:
            lines[number], end = line[: document.start()] + line[document.end() :], document[2]
    return "\n".join(lines)


def _assign(words: Sequence[str], assigned: re.Match[str], variables: Variables, given: Mapping[str, str]) -> int:
    """Carry out the assignment that a command begins with; returns its number of words."""
    name, stop = assigned[1], 1
    value = [" ".join(expand(words[0][assigned.end() :], variables, split=False))]
    if words[1:2] == ["("]:
        stop = words.index(")") + 1 if ")" in words else len(words)
        value = [field for word in words[2 : stop - 1] for field in expand(word, variables)]
    if assigned[2]:
        before = variables.get(name, [])
        value = before + value if words[1:2] == ["("] else ["".join(before) + value[0]]
    if sum(map(len, value)) > MOST_CHARACTERS:
        raise ValueError(f"the variable {name} has more than {MOST_CHARACTERS:,} characters")
    if name not in given:
        variables[name] = value
    return stop


def expand(word: str, variables: Variables, split: bool = True) -> list[str]:
    """Return the fields that a shell makes of a word. `split`: cut unquoted variables at spaces."""
    fields, quoted = [""], False
    for piece in _PIECE.finditer(word):
        text, kind = piece[0], piece.lastgroup
        if kind == "escape":
            fields[-1] += text[1:].replace("\n", "")
        elif kind == "quoted" and text[0] == "'":
            fields[-1] += text[1:-1]
            quoted = True
        elif kind == "quoted" and (array := _ARRAY.fullmatch(text[1:-1])) and array[1] in variables:
            variables.count(variables[array[1]])
            fields[-1:] = [fields[-1] + "", *variables[array[1]], ""] if fields[-1] else [*variables[array[1]], ""]
        elif kind == "quoted":
            fields[-1] += _substitute(re.sub(r"\\(\n|(.))", r"\2", text[1:-1]), variables)
            quoted = True
        else:
            values = _substitute(text, variables)
            parts = re.split(r"\s+", values) if split and values != text else [values]
            fields[-1] += parts[0]
            fields += parts[1:]
        if sum(map(len, fields)) > MOST_CHARACTERS:
            raise ValueError(f"{shown(word)} expands to more than {MOST_CHARACTERS:,} characters")
    return fields if quoted and len(fields) == 1 else [field for field in fields if field]


def _substitute(text: str, variables: Variables) -> str:
    def value(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _sum(match, variables)
        known, default = variables.get(match["name"] or match["bare"]), match["default"]
        if known is not None and (any(known) or default is None):
            values = known if match["all"] else known[:1]
            variables.count(values)
            return " ".join(values)
        return match[0] if default is None else _substitute(default.strip("'\""), variables)

    return _VARIABLE.sub(value, text)


def _sum(match: re.Match[str], variables: Variables) -> str:
    """Return the value of `$((A * 2))`, or the text itself if it is unknown."""

    def known(name: re.Match[str]) -> str:
        value = next(iter(variables.get(name[1], [])), "")
        return value if re.fullmatch(r"\d{1,18}", value) else name[0]

    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", known, match["sum"].strip())
    if len(text) > 200:
        return match[0]
    try:
        return str(_computed(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("no sum")


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the options and their values: true without any, a list for several. Raises UserError for leading words."""
    flags: dict[str, Any] = {}
    values: list[Any] | None = None
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name if name.startswith("deepspeed") else name.replace("_", "-")
            values = [_plain(value)] if equals else []
        elif values is None:
            raise UserError(f"{shown(word)}: expected an option of pretrain_gpt.py, --NAME")
        else:
            values.append(_plain(word))
        flags[name] = True if not values else values[0] if len(values) == 1 else values
    return flags


def _plain(word: str) -> Any:
    if word in ("True", "true", "False", "false"):
        return word in ("True", "true")
    for kind in (int, float):
        try:
            if re.match(r"[-+.\d]", word):
                return kind(word)
        except ValueError:
            continue
    return word
