"""Bad input ends in one clear message, exit status not 0, no traceback."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.end_to_end.commands import SMALL, pretrain


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.layres=3"], "model.layres = 3: unknown key; did you mean model.layers?"),
        (["model=bert"], "model = bert: unknown option; use one of deepseek_v3_671b, gpt2_124m, gpt3_125m"),
        (["train.steps=many"], "train.steps = 'many': must be an integer"),
        (["model.heads=7"], "model.heads = 7: must divide model.hidden = 32; nearest valid values: 2, 4, 8"),
        (["batch.micro_size=3"], "batch.global_size = 4: must be a multiple of batch.micro_size"),
        (["parallel.tensor=4"], "needs at least 4 processes, one per device, got 1; start 4 processes"),
        (["data=indexed", "data.train=[nowhere/corpus]", "validation.every=0"], "nowhere/corpus.bin"),
        (["checkpoint.resume=nowhere"], "nowhere: no checkpoint here"),
    ],
)
def test_one_message(overrides: list[str], expected: str, tmp_path: Path) -> None:
    done = pretrain(tmp_path / "run", *SMALL, "data=synthetic", "validation.every=0", "train.steps=1", *overrides)
    assert done.returncode not in (0, None)
    assert expected in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count(expected) == 1


def test_only_the_first_of_several_processes_speaks(tmp_path: Path) -> None:
    for override, expected in (
        ("+model.layres=3", "did you mean model.layers"),
        ("model.layres=3", "did you mean model.layers"),
    ):
        done = pretrain(tmp_path / "run", override, processes=2)
        assert done.returncode != 0
        assert done.stderr.count(expected) == 1, done.stderr


def test_the_command_of_a_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("pangu.tasks.lm_eval", run_name="__main__")
    assert "needs the package lm-eval: pip install lm-eval" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/1").exists(), reason="needs a folder that nobody may write")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """/proc refuses new files even to root; a file in the way refuses them everywhere."""
    (tmp_path / "file").write_text("in the way")
    for output in ("/proc/pangu", str(tmp_path / "file" / "run")):
        done = pretrain(Path(output), *SMALL, "data=synthetic", "validation.every=0", "train.steps=1")
        assert done.returncode == 2
        assert f"cannot write {output}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_for_compiled_code_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes it whether anything is compiled or not."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    done = pretrain(tmp_path / "run", *SMALL, "data=synthetic", "validation.every=0", "train.steps=1")
    assert done.returncode == 2
    assert f"TORCHINDUCTOR_CACHE_DIR = {tmp_path}/file/cache: torch cannot create this folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_of_another_run(tmp_path: Path) -> None:
    quiet = [*SMALL, "data=synthetic", "validation.every=0", "train.steps=1"]
    assert pretrain(tmp_path, *quiet).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = pretrain(tmp_path, *quiet, "model.layers=3", "train.steps=2")
    assert other.returncode == 2
    assert "model.layers = 3: the checkpoint has 2" in other.stderr
    refused = pretrain(tmp_path, *quiet, "checkpoint.resume=none")
    assert refused.returncode == 2
    assert "already exists" in refused.stderr
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
