"""An installed package needs no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.end_to_end.commands import SMALL, VARIABLES
from tests.spawn import repository

BESIDE = ("configs", "tools", "scripts")
BUILD = "import setuptools.build_meta, sys; print(setuptools.build_meta.build_wheel(sys.argv[1]))"


def build(folder: Path) -> Path:
    """The wheel of a copy of the sources, which building leaves files in."""
    source, without = folder / "source", shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*BESIDE, "pangu"):
        shutil.copytree(repository() / name, source / name, ignore=without)
    for path in repository().glob("*.*"):
        if path.is_file():
            shutil.copy(path, source)
    shutil.copy(repository() / "LICENSE", source)
    line = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_a_wheel_has_configurations_and_programs_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    with ZipFile(build(tmp_path)) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    expected = {
        f"pangu/{path.relative_to(repository()).as_posix()}"
        for folder in BESIDE
        for path in (repository() / folder).rglob("*.*")
        if path.suffix == (".yaml" if folder == "configs" else ".py")
    }
    assert expected <= names
    inside = {path.relative_to(repository()).as_posix() for path in (repository() / "pangu").rglob("*.*")}
    assert {name for name in inside if name.endswith((".yaml", ".cpp", ".pyi", ".html"))} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"pangu"}

    def run(module: str, *words: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        environment["PYTHONPATH"] = str(tmp_path / "site")
        line = [sys.executable, "-m", f"pangu.{module}", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    words = ("+config=quickstart", *SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "sample.tokens=0")
    said = run("pretrain", *words, "train.steps=2", "train.device=cpu")
    assert (tmp_path / "runs" / "quickstart" / "summary.json").exists()
    assert "\n  python -m pangu.pretrain +config=quickstart " in said
    assert "parameters" in run("tools.plan", "+config=quickstart")
