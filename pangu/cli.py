"""Command `pangu`: the programs of this project under one name, e.g. `pangu train +config=quickstart`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pangu
from pangu.common.commands import PROGRAMS, print_error
from pangu.common.exit_status import INTERRUPTED, USER_ERROR
from pangu.config.build import keys_of
from pangu.config.schema import RunConfig
from pangu.config.suggest import close_names
from pangu.pretrain import find_configs

FLAGS = {
    *("-h", "--help", "-m", "--module", "--standalone"),
    *(f"--{name.replace('-', mark)}" for name in ("no-python", "run-path", "virtual-local-rank") for mark in "-_"),
}
"""Options of torchrun that no value follows."""
_HELP = """\
{description}
Usage: pangu COMMAND ...; `pangu COMMAND --help` explains each.

{commands}

With several processes: pangu launch --nproc-per-node=2 train +config=quickstart
Bash completion: complete -o default -o nospace -C "pangu complete" pangu
"""


def file_of(command: str) -> Path:
    """Return the file of a command: inside an installed package, or next to the package in a checkout."""
    package, name = Path(pangu.__file__).resolve().parent, f"{PROGRAMS[command][0]}.py"
    return next(path for path in (package / name, package.parent / name) if path.is_file())


def launched(words: Sequence[str]) -> list[str]:
    """Return the words of a launcher with `-m pangu` before a command's name; a file stays as it is."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        has_value = "=" not in word and word not in FLAGS and (word.startswith("--") or len(word) == 2)
        place += 1 + has_value
    if place >= len(words) or words[place] not in PROGRAMS:
        return list(words)
    return [*words[:place], "-m", "pangu", *words[place:]]


def completions(line: str) -> Iterator[str]:
    """Yield the words that can take the place of the last one of a line."""
    *words, last = line.split(" ")[1:] or [""]
    command = next((word for word in words if word in PROGRAMS and word != "launch"), "")
    overrides = _overrides() if command in ("train", "plan") else ()
    candidates = PROGRAMS if not command else _options(file_of(command)) if last[:1] == "-" else overrides
    return (word for word in dict.fromkeys(candidates) if word.startswith(last))


def _options(file: Path) -> Iterator[str]:
    """Yield the options of a program from its source and those that it imports from: to import it takes seconds."""
    package = Path(pangu.__file__).parent.parent
    modules = re.findall(r"^from (pangu\.\S+) import", file.read_text(encoding="utf-8"), re.MULTILINE)
    for path in (file, *(package / f"{module.replace('.', '/')}.py" for module in modules)):
        yield from re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"(--[\w-]+)"', path.read_text(encoding="utf-8"))
    yield "--help"


def _overrides() -> Iterator[str]:
    """Yield what can be given to a run: recipes, options of groups, and keys."""
    for path in sorted(find_configs().glob("*/*.yaml")):
        group = "+config" if path.parent.name == "config" else path.parent.name
        yield f"{group}={path.stem}"
    yield from (f"{key}=" for key in keys_of(RunConfig))


def complete(line: str, word: str) -> None:
    """Print completions of a line, one per line; `word` is the part of the last word that the shell replaces."""
    last = line.rpartition(" ")[2]
    for found in completions(line):
        print(found[len(last) - len(word) :])


def run(path: Path) -> None:
    """Run a file as the main module; unlike runpy, keep `sys.argv`, from which usage messages take the command."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(main))


def main() -> None:
    """Carry out the command line; end the process with its exit status."""
    match sys.argv[1:]:
        case [] | ["--help" | "-h" | "help", *_]:
            commands = "\n".join(f"  {name:<10} {does}" for name, (_, does) in PROGRAMS.items())
            print(_HELP.format(description=str(pangu.__doc__).partition("\n")[0], commands=commands), end="")
        case ["--version", *_]:
            print(pangu.__version__)
        case [command, *words] if command in PROGRAMS:
            sys.argv = [f"pangu {command}", *(launched(words) if command == "launch" else words)]
            try:
                run(file_of(command))
            except KeyboardInterrupt:  # of the first imports
                print("\ninterrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)
        case ["complete", *given] if "COMP_LINE" in os.environ:
            line, point = os.environ["COMP_LINE"], os.environ.get("COMP_POINT", "")
            line = line[: int(point)] if re.fullmatch("[0-9]{1,9}", point) else line
            complete(line, given[1] if len(given) > 1 else line.rpartition(" ")[2])  # zsh gives no words
        case [wrong, *_]:
            near = ", ".join(close_names(wrong, PROGRAMS) or PROGRAMS)
            sys.argv[0] = "pangu"
            print_error(f"unknown command: pangu {wrong}; use {near}, or pangu --help")
            sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
