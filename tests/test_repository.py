"""Files around the package agree with each other: shortcuts, hooks and workflows run what CI runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import pangu
from tests.spawn import repository

ROOT = repository()
YAML = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


def commands(target: str) -> list[str]:
    """Return the commands that a target of the Makefile runs."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_each_file_for_a_service_can_be_read(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_shortcuts_run_what_ci_runs() -> None:
    """What `make lint` accepts, CI accepts."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert commands("lint")
    assert not [command for command in commands("lint") if command not in ci]
    assert commands("test") == ["pytest"]
    assert commands("ci") == [".ci/run"]
    assert set(commands("docs")[0].split()) <= set(" ".join(ci).split())


def test_workflows_call_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]


def test_a_release_has_a_readme_whose_links_work_on_pypi(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    place = next(number for number, run in enumerate(runs) if "README.md" in run)
    assert "python -m build" in runs[place + 1]
    shutil.copy(ROOT / "README.md", tmp_path)
    variables = {**os.environ, "GITHUB_REPOSITORY": "some/where", "GITHUB_REF_NAME": "v0.1.0"}
    subprocess.run(["bash", "-c", runs[place]], cwd=tmp_path, env=variables, check=True)
    before, after = (
        re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")) for folder in (ROOT, tmp_path)
    )
    wrong = [link for link in after if not link.startswith(("https://", "#"))]
    assert not wrong
    address = "https://github.com/some/where/blob/v0.1.0/"
    assert [link.removeprefix(address) for link in after] == before
    assert all((ROOT / link.removeprefix(address).partition("#")[0]).is_file() for link in after if address in link)


def test_hooks_run_the_tools_of_the_environment() -> None:
    """So a hook and CI cannot disagree about a version."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    named = {word for hook in local["hooks"] for word in hook["entry"].split() if word.startswith("tests/")}
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert re.match(r"\d+\.\d+\.\d+", pangu.__version__)[0] == citation["version"]
