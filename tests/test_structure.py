"""The house stays as it was designed: imports go down only, torch.distributed has two homes."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from pangu.schedule.orders import SCHEDULES
from tests import size
from tests.end_to_end.commands import SMALL, command
from tests.spawn import repository

FLOORS = {
    "common": 0,
    "config": 1,
    "topology": 2,
    "collectives": 3,
    "metrics": 3,
    "layers": 4,
    "data": 4,
    "models": 5,
    "optim": 5,
    "zero": 6,
    "schedule": 7,
    "pipeline": 8,
    "checkpoint": 9,
    "evaluation": 10,
    "library": 10,
    "training": 11,
    "interop": 12,
    "prepare": 11,
    "dryrun": 12,
    "tasks": 13,
    "planning": 13,
    "calibration": 14,
    "report": 14,
}
CORE = FLOORS.keys() - {*size.PERIPHERY}
PACKAGE = repository() / "pangu"
CALLED_BY_OTHERS = {"PanguLM"}
"""What only other programs call: lm-eval's command, by a registered name."""
LEDGER = ("ledger.py", "stage_ledger.py", "buffers.py", "groups.py")
"""Files of the schedule that planning adds up, under the same rule as it."""
FILES = sorted(PACKAGE.glob("*/**/*.py"))
SHIPPED = [path for folder in (PACKAGE, *size.COMMANDS) for path in sorted(folder.glob("**/*.py"))]
"""All files of the installed package."""


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, at the top or lazily, type-checking imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(path: Path) -> str:
    """The folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0]


def test_every_folder_has_a_floor() -> None:
    folders = {floor_of(path) for path in FILES}
    assert folders == set(FLOORS)
    assert len(FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down_only(path: Path) -> None:
    own = floor_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pangu" and len(parts) > 1 and parts[1] in FLOORS and parts[1] != own:
            assert FLOORS[parts[1]] < FLOORS[own], (
                f"{own} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[parts[1]]})"
            )


def code_strings(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a file but its docstrings: code and commands for other processes are among them."""
    explained = set(map(id, docstrings(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
            yield node.value


@pytest.mark.parametrize("folder", sorted(CORE))
def test_the_core_knows_no_periphery(folder: str) -> None:
    """The core neither imports the periphery, even lazily, nor names its modules for subprocesses."""
    beside = "|".join((*size.PERIPHERY, "plan_run", "pretrain"))
    named = re.compile(rf"\bpangu[./]({beside})\b")
    found = set()
    for path in FILES:
        if floor_of(path) == folder:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {(path.name, text) for text in (*imports(path), *code_strings(tree)) if named.search(text)}
    assert found == set()


@pytest.mark.parametrize("folder", ["dryrun", "library", "training"])
def test_what_is_planned_knows_no_planner(folder: str) -> None:
    """Neither imports, lazy ones included, nor names of modules for subprocesses: only the command line joins both."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES if floor_of(path) == folder}
    assert texts
    assert not [path for path, text in texts.items() if re.search(r"pangu[./]planning|\bplanning\.\w", text)]


def test_planning_names_no_schedule_and_no_zero_stage() -> None:
    """What is added to either is planned without a change."""
    schedules = "|".join(map(re.escape, SCHEDULES))
    named = re.compile(rf"\b({schedules})\b|ZeRO-\d|\b(zero|stage)\b\s*([<>=!]=?|(not )?in)\s*[\d({{\[]")
    files = [path for path in FILES if floor_of(path) in ("planning", "report") or path.name in LEDGER]
    found = {path.name: [hit[0] for hit in named.finditer(path.read_text(encoding="utf-8"))] for path in files}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_only_topology_and_collectives_know_torch_distributed() -> None:
    # its part `checkpoint` writes Megatron's files, in one process, and sends nothing
    users = {
        floor_of(path)
        for path in FILES
        for name in imports(path)
        if name.startswith("torch.distributed") and not name.startswith("torch.distributed.checkpoint")
    }
    # a unit's reduction is typed with torch's own ProcessGroup and Work; a dry run stands in for the backend, and a
    # calibration times it
    assert users <= {"topology", "collectives", "zero", "dryrun", "calibration"}
    calls = {
        floor_of(path)
        for path in FILES
        if re.search(r"\bdist\.(?!ProcessGroup|Work\b)\w+", path.read_text(encoding="utf-8"))
    }
    assert calls == {"topology", "collectives", "dryrun", "calibration"}


@pytest.mark.parametrize("folder", ["common", "config"])
def test_the_lowest_floors_import_the_standard_library_only(folder: str) -> None:
    import sys

    for path in (PACKAGE / folder).glob("*.py"):
        for name in imports(path):
            own = name.startswith(("pangu.common.", f"pangu.{folder}."))
            assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_models_never_see_a_rank() -> None:
    for path in [*(PACKAGE / "models").glob("*.py"), *(PACKAGE / "optim").glob("*.py")]:
        assert not any(name.startswith(("pangu.topology.mesh", "pangu.collectives")) for name in imports(path)), path


def functions() -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function of the package."""
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                yield f"{path.relative_to(repository())}: {node.name}", node.end_lineno - node.lineno + 1


def test_files_and_functions_fit_a_screen() -> None:
    for path in SHIPPED:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
    lines = dict(functions())
    assert not {name: count for name, count in lines.items() if count > 60}
    assert sum(count <= 25 for count in lines.values()) >= 0.9 * len(lines)


def docstrings(tree: ast.Module) -> list[ast.Constant]:
    """Return all docstrings of a file, those of fields included."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    texts = [node.value for parent in nodes for node in parent.body if isinstance(node, ast.Expr)]
    return [text for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def docstring_lines(tree: ast.Module) -> int:
    """Return the number of docstring lines of a file."""
    return sum((text.end_lineno or 0) - text.lineno + 1 for text in docstrings(tree))


FORBIDDEN_OPENERS = ("Of", "What", "That", "Those", "As", "By", "How", "Who", "Its", "The same", "Whether")
"""First words of a docstring that leave its reader without a noun or a verb to hold on to."""
FORBIDDEN_WORDS = re.compile(r"\b(anew|beside|goes on|so (many|much)|whole ones?)\b")
"""Words for which plain technical English has others: again, next to or during, continues, this many, full."""
FORBIDDEN_NAMES = re.compile(r"of_\w+|told|beside|goes_on")
"""Names of variables and arguments that are not nouns."""


def documented_folders() -> set[str]:
    """Folders of the package whose docstrings ruff checks."""
    settings = tomllib.loads((repository() / "pyproject.toml").read_text(encoding="utf-8"))
    exempt = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    return {folder for folder in FLOORS if "D" not in exempt.get(f"pangu/{folder}/**", [])}


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    files = [path for path in FILES if floor_of(path) in documented_folders()]
    assert files
    others = (repository().glob(f"{folder}/**/*.py") for folder in ("benchmarks", "scripts", "tools"))
    # `planner_accuracy` has fields that open with "Whether"
    files += [path for path in chain.from_iterable(others) if path.parent.name != "planner_accuracy"]
    opener = re.compile(rf"({'|'.join(FORBIDDEN_OPENERS)})\b")
    found = {
        f"{path}:{text.lineno}"
        for path in files
        for text in docstrings(ast.parse(path.read_text("utf-8")))
        if opener.match(text.value)
    }
    assert not found


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring and comment of a file."""
    yield from ((node.lineno, node.value) for node in docstrings(ast.parse(text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def variables(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each argument and assigned variable of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_words_and_names_are_plain() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SHIPPED}
    found = [
        f"{path}:{line}: {name}"
        for path in texts
        for line, name in variables(texts[path])
        if FORBIDDEN_NAMES.fullmatch(name)
    ]
    found += [
        f"{path}:{line}: {word[0]}"
        for path in texts
        for line, text in prose(texts[path])
        for word in FORBIDDEN_WORDS.finditer(text)
    ]
    assert found == []


def test_docstrings_are_an_eighth_of_the_package() -> None:
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    share = sum(docstring_lines(ast.parse(source)) for source in sources) / sum(map(len, map(str.splitlines, sources)))
    assert 0.12 <= share <= 0.15


def test_the_package_stays_small() -> None:
    found, limits = size.figures(), size.limits()
    assert found.keys() == limits.keys()
    assert {name: figure for name, figure in found.items() if figure > limits[name]} == {}


def test_limits_only_go_down_or_say_why() -> None:
    assert list(size.unexplained()) == []


def public_names(path: Path) -> Iterator[str]:
    """Functions, classes and methods that a file offers. A method of a class with a base may be asked for by others."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from (method.name for method in node.body if isinstance(method, ast.FunctionDef))


def test_nothing_is_there_for_tests_only() -> None:
    program = [path for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".yaml")]
    program += [*(repository() / "configs").rglob("*.yaml"), repository() / "pretrain.py"]
    program += [path for folder in ("tools", "scripts", "examples") for path in (repository() / folder).glob("*.*")]
    words = Counter(word for path in program for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))
    names = {name for path in FILES for name in public_names(path) if not name.startswith("__")}
    assert {name for name in names if words[name] == 1} <= CALLED_BY_OTHERS


NEW_IN_A_RUN = """
import sys
from pathlib import Path

import pangu
from pangu.pretrain import pretrain
pretrain(Path("configs").resolve())
counted = ("pangu.", "torch._dynamo", "torch._inductor", "sympy", "triton")
print("loaded", *(name for name in sys.modules if name.startswith(counted)))
"""
BESIDE = (*size.PERIPHERY, "library")
"""Folders that only commands beside a plain run load."""


def test_a_plain_run_loads_neither_the_compiler_nor_the_periphery(tmp_path: Path) -> None:
    """A run of two steps in one process. Torch's compiler and Triton would take 75 MiB of it each."""
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "train.steps=2", "checkpoint.every=0")
    done = command("-c", NEW_IN_A_RUN, *words, "train.device=cpu", f"train.output={tmp_path / 'run'}")
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    assert "pangu.training.step" in loaded, done.stderr
    unwanted = ("torch._dynamo", "torch._inductor", "sympy", "triton", *(f"pangu.{folder}" for folder in BESIDE))
    assert {name for name in loaded if name.startswith(unwanted)} == set()


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Python before 3.11.5, as in Debian 12, matches `(...)++` wrongly, but `(?>(...)+)` right (cpython#106052)."""
    found = [path for path in PACKAGE.rglob("*.py") if re.search(r"r[bf]?['\"].*\)[+*?]\+", path.read_text("utf-8"))]
    assert not found


def test_few_imports_stand_in_functions() -> None:
    """Ruff refuses them without a reason; those of modules that are always installed are ten at most."""
    found = set()
    for path in SHIPPED:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for inner in ast.walk(node):
                    if isinstance(inner, (ast.Import, ast.ImportFrom)) and "- " not in lines[inner.lineno - 1]:
                        found.add((path, node.name))
    assert 0 < len(found) <= 10, found
