"""What the page about extending adds is planned as it is carried out, with no change of the planner."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.spawn import repository

PAGE = repository() / "docs" / "extending.md"
COMPARE = """
import sys
from pangu.dryrun.roles import kept_workers
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import values
from tests.dryrun.planned import assert_planned

with kept_workers():
    for layout in sys.argv[1:]:
        assert_planned(values(layout, "model.hidden=256", "model.layers=8", "precision=bf16"), SharedWorker())
"""
EXTENDED = [
    "parallel.schedule=eager_1f1b parallel.pipeline=4 parallel.data=2 parallel.zero=2 batch.global_size=16",
    "parallel.schedule=eager_1f1b parallel.pipeline=2 parallel.data=2 parallel.zero=3 batch.global_size=16 "
    "model.layer_scale=true parallel.tensor=2 parallel.sequence=true",
]
KEPT = ["parallel.data=2 parallel.zero=3 batch.global_size=8"]


def section(page: str, name: str) -> str:
    text = page.partition(f"\n## {name}\n")[2].partition("## ")[0]
    assert changes(text), name
    return text


def changes(text: str) -> list[tuple[str, str]]:
    """Files and what a page changes in them, in the form of diff."""
    return re.findall(r"^    --- (\S+)\n((?:    [-+ @].*\n)+?)(?=    ---|\n)", text, re.M)


def change(path: Path, hunk: Sequence[str]) -> None:
    """Change lines of a file, which must be there once."""
    before, after = ("".join(f"{line[5:]}\n" for line in hunk if line[4] != sign) for sign in "+-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after), encoding="utf-8")


def extend(root: Path, text: str) -> None:
    """Change a copy of the program as a section says; it has the new schedule behind the others."""
    for place, changed in changes(text):
        for path in root.glob(place):
            for hunk in changed.split("    @@\n"):
                change(path, hunk.splitlines())
    for example in doctest.DocTestParser().get_examples(text):
        if example.source.startswith("@register"):
            with (root / "pangu" / "schedule" / "orders.py").open("a", encoding="utf-8") as orders:
                orders.write(f"\n\n{example.source}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "layouts"),
    [(["A model", "A schedule"], EXTENDED), (["ZeRO"], KEPT)],
    ids=["a module and a schedule", "ZeRO"],
)
def test_what_the_page_adds_is_planned_as_it_is_carried_out(
    sections: list[str], layouts: list[str], tmp_path: Path
) -> None:
    for folder in ("configs", "pangu", "tests"):
        shutil.copytree(repository() / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in sections:
        extend(tmp_path, section(PAGE.read_text(encoding="utf-8"), name))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, *layouts],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_chinese_page_changes_the_same() -> None:
    pages = (page.read_text(encoding="utf-8") for page in (PAGE, PAGE.with_suffix(".zh.md")))
    english, chinese = map(changes, pages)
    assert len(english) == 9
    assert chinese == english
