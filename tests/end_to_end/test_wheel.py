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
BUILD = "import setuptools.build_meta, sys; print(setuptools.build_meta.build_{}(sys.argv[1]))"


def built(kind: str, source: Path, folder: Path) -> Path:
    """A `wheel` or `sdist` of sources."""
    line = [sys.executable, "-c", BUILD.format(kind), str(folder)]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def wheel_of_a_source_distribution(folder: Path) -> Path:
    """Both are built from copies of the sources, which building leaves files in."""
    source, without = folder / "source", shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*BESIDE, "pangu"):
        shutil.copytree(repository() / name, source / name, ignore=without)
    for path in repository().glob("*.*"):
        if path.is_file():
            shutil.copy(path, source)
    shutil.copy(repository() / "LICENSE", source)
    shutil.unpack_archive(built("sdist", source, folder), folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    assert unpacked.name.startswith("pangu_train-")
    return built("wheel", unpacked, folder)


def test_a_wheel_has_configurations_and_programs_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    wheel, site = wheel_of_a_source_distribution(tmp_path), tmp_path / "site"
    names = set(ZipFile(wheel).namelist())
    expected = {
        f"pangu/{path.relative_to(repository()).as_posix()}"
        for folder in BESIDE
        for path in (repository() / folder).rglob("*.*")
        if path.suffix == (".yaml" if folder == "configs" else ".py")
    }
    expected |= {f"pangu/scripts/{name}" for name in ("slurm/pretrain.sbatch", "kubernetes/job.yaml", "grafana.json")}
    assert expected <= names
    inside = {path.relative_to(repository()).as_posix() for path in (repository() / "pangu").rglob("*.*")}
    assert {name for name in inside if name.endswith((".yaml", ".cpp", ".pyi", ".html"))} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"pangu", "pangu_train.py"}

    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}{os.pathsep}{environment['PATH']}"}

    def run(*words: str, status: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    words = ("+config=quickstart", *SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "sample.tokens=0")
    words = (*words, "train.steps=2", "train.device=cpu")
    said = run("pangu", "launch", "--nproc-per-node=2", "train", *words)
    assert (tmp_path / "runs" / "quickstart" / "summary.json").exists()
    assert "\n  pangu launch --nproc-per-node=2 train +config=quickstart " in said
    assert "\n  pangu train --help\n" in said
    assert "quickstart" in run("pangu", "inspect", "runs/quickstart/checkpoints/step-00000002")
    assert "\n  pangu train +config=quickstart " in run(sys.executable, "-m", "pangu.pretrain", *words, "train.steps=3")
    # a measured cluster is used where it was written, not from the folder of the package
    said = run("pangu", "calibrate", "--quick", "--output", "mine.yaml")
    assert said.splitlines()[-1] == "mine.yaml: to plan and forecast with it, set cluster=mine.yaml"
    assert "expected     on mine: " in run("pangu", "plan", *words, "cluster=mine.yaml")
    assert "on mine: " in run("pangu", "train", *words, "cluster=mine.yaml", "dry_run=true")
    assert "use train, launch, plan, " in run("pangu", "pretrain", status=2)
