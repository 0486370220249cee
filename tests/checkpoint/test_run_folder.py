"""config.yaml comes back as it was, whatever it holds; a damaged or hostile one is named; links are not followed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from pangu.checkpoint.files import Slice, checkpoint_path, commit, start, write_slices
from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import trained_model
from pangu.checkpoint.run_folder import FOLDERS, make_run_folder, save_config
from pangu.common.errors import UserError
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.models.parameters import logical_shapes
from tests.configs import composed
from tests.end_to_end.commands import SMALL
from tests.pace import processor_time_below


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return build(RunConfig, composed(*SMALL, "data=synthetic", "validation.every=0"))


@pytest.fixture(scope="module")
def checkpoint(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run folder without config.yaml; holds no values, only names and shapes."""
    path = checkpoint_path(tmp_path_factory.mktemp("run") / "checkpoints", 1)
    start(path)
    shapes = logical_shapes(config.model).items()
    slices = [(f"weight/{name}", Slice(torch.zeros(shape), shape, (0,) * len(shape))) for name, shape in shapes]
    commit(path, [write_slices(path, 0, slices)], {"step": 1})
    return path


@pytest.mark.parametrize(
    "prompt", ["${", "a ${train.output} b", "${nowhere}", "\\${", "- x: [1, {", "'\"\n\t", "1e3", "今天\x1b"]
)
def test_any_prompt_comes_back(config: RunConfig, tmp_path: Path, prompt: str) -> None:
    asked = replace(config, sample=replace(config.sample, prompts=(prompt, prompt)))
    save_config(tmp_path, asked)
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert build(RunConfig, yaml.safe_load(text)) == asked


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: " + b"[" * 1000, "cannot be read"),
        (b"[" * 1000, "cannot be read"),
        (b"model: {a: " * 3000, "cannot be read"),
        (BOMB.encode() + b"model: *i\ndata: {}\nprecision: {}\n", "aliases"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"model: 2020-99-99", "cannot be read"),
        (b"? [a]\n: 1", "cannot be read"),
        (b"model: \x1b[31m", "cannot be read"),
        (b"- 1", "cannot be read"),
        (b"", "cannot be read"),
        (b"#" * (5 * 2**20), "more than 4194304 bytes"),
        (b"model: !!python/object/apply:os.system [true]", "cannot be read"),
    ],
    ids=range(12),
)
def test_a_hostile_configuration_is_named(checkpoint: Path, content: bytes, words: str) -> None:
    path = checkpoint.parent.parent / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        trained_model(checkpoint, read_index(checkpoint))
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", 10**9),
        ("layers", 900),
        ("hidden", 2**19),
        ("vocab", 2**30),
        ("hidden", -32),
        ("heads", 0),
    ],
)
def test_a_model_that_is_not_the_checkpoints_takes_no_memory(
    config: RunConfig, checkpoint: Path, key: str, value: int
) -> None:
    save_config(checkpoint.parent.parent, config)
    path = checkpoint.parent.parent / "config.yaml"
    values = yaml.safe_load(path.read_text())
    assert trained_model(checkpoint, read_index(checkpoint)).model == config.model
    values["model"][key] = value
    path.write_text(yaml.safe_dump(values))
    with processor_time_below(5.0), pytest.raises(UserError):
        trained_model(checkpoint, read_index(checkpoint))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_configuration_that_is_no_file(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    path = checkpoint.parent.parent / "config.yaml"
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("password")
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(path)
    with pytest.raises(UserError, match="is a symbolic link" if kind == "link" else "is not a regular file") as caught:
        trained_model(checkpoint, read_index(checkpoint))
    assert "password" not in str(caught.value)
    path.unlink()


@pytest.mark.parametrize("name", [*FOLDERS, "checkpoints/step-00000005"])
def test_links_in_a_run_folder_are_refused(config: RunConfig, tmp_path: Path, name: str) -> None:
    """The run folder itself may be one."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").mkdir()
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "folder")
    make_run_folder(run)
    (run / "config.yaml").symlink_to(tmp_path / "elsewhere" / "config.yaml")
    save_config(run, config)
    (run / "plots").rmdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{run / name}: is a symbolic link"):
        make_run_folder(run)
    assert not list((tmp_path / "elsewhere").iterdir())
