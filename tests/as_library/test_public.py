"""What `pangu` names: nothing is imported before it is used, each name is documented, and examples do what they say."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest

import pangu
from tests.end_to_end.commands import command
from tests.spawn import Program, repository, run_ranks

PAGES = [repository() / "docs" / name for name in ("library.md", "library.zh.md")]


def test_importing_the_package_imports_nothing_else() -> None:
    done = command("-c", "import sys; before = {*sys.modules}; import pangu; print(*({*sys.modules} - before))")
    assert {name for name in done.stdout.split() if name.partition(".")[0] in ("pangu", "torch", "numpy")} == {"pangu"}


def test_the_stub_names_the_same() -> None:
    tree = ast.parse((repository() / "pangu" / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert homes == pangu._MODULE_OF  # type: ignore[attr-defined]
    assert set(pangu.__all__) == {"__version__", *homes}


@pytest.mark.parametrize("name", sorted({*pangu.__all__} - {"__version__"}))
def test_every_name_is_documented(name: str) -> None:
    public = getattr(pangu, name)
    assert (inspect.getdoc(public) or "").strip()
    for page in PAGES:
        assert re.search(rf"[`. ]{name}[`(]", page.read_text(encoding="utf-8")), f"{page.name}: {name}"
    methods = [method for key, method in vars(public).items() if not key.startswith("_") and inspect.isfunction(method)]
    if public.__module__.startswith("pangu.library"):
        assert all(method.__doc__ for method in methods)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'pangu' has no attribute 'trainer'"):
        pangu.trainer  # type: ignore[attr-defined]  # noqa: B018


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^ {4}(torchrun .*examples/.*)$", text, re.MULTILINE)]


def run_example(script: str) -> None:
    runpy.run_path(str(repository() / script), run_name="__main__")


def figures(program: Program) -> list[float]:
    assert program.returncode == 0, program.stderr
    return [float(number) for number in re.findall(r"[0-9]+\.[0-9]+", program.stdout)]


def test_each_example_has_its_command_in_both_languages() -> None:
    assert commands(PAGES[0]) == commands(PAGES[1])
    scripts = {path.relative_to(repository()).as_posix() for path in (repository() / "examples").glob("*.py")}
    assert {words[-1] for words in commands(PAGES[0])} == scripts
    for script in scripts:
        lines = (repository() / script).read_text(encoding="utf-8").splitlines()
        assert len(lines) < 40
        assert any(line.split() == words for line in lines for words in commands(PAGES[0]) if words[-1] == script)


@pytest.mark.parametrize("words", commands(PAGES[0]), ids=lambda words: words[-1])
def test_an_example_does_on_several_processes_what_it_does_on_one(words: list[str]) -> None:
    """To fp32's rounding, of sums in another order, over five steps."""
    (option, script) = words[1:]
    world = int(option.removeprefix("--nproc-per-node="))
    alone, together = (figures(run_ranks(size, run_example, script)) for size in (1, world))
    assert len(alone) == 10
    assert together == pytest.approx(alone, rel=1e-4)
