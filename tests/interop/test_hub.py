"""An export goes to the Hugging Face hub, privately unless told; nothing is converted for a hub that refuses."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.training.test_resume import train
from tools.convert_checkpoint import main


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A hub that takes everything, by calls that the real client's signatures allow."""
    received: list[tuple[str, dict[str, Any]]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            return partial(self.call, name)

        def call(self, name: str, **values: Any) -> str:
            inspect.signature(getattr(huggingface_hub.hf_api.HfApi, name)).bind(self, **values)
            received.append((name, values))
            return f"https://hub/{values.get('repo_id')}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    return received


def convert(folder: Path, *options: str, target: str = "huggingface") -> int:
    return main(["--from", "pangu", "--to", target, "--input", f"{folder}/run", "--output", f"{folder}/out", *options])


@pytest.mark.parametrize("public", [False, True])
def test_an_export_is_uploaded_and_private_unless_told(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], public: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", 1)
    assert convert(tmp_path, "--push-to-hub", "my-lab/first", *(["--public"] if public else [])) == 0
    assert [name for name, _ in calls] == ["whoami", "create_repo", "upload_folder"]
    assert calls[1][1] == {"repo_id": "my-lab/first", "private": not public, "exist_ok": True}
    assert (calls[2][1]["repo_id"], calls[2][1]["folder_path"]) == ("my-lab/first", tmp_path / "out")
    assert {"README.md", "config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "uploaded to https://hub/my-lab/first" in (said := capsys.readouterr().out)
    assert "hf_secret" not in said


def test_a_hub_that_cannot_be_reached_is_one_message_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    # Nothing listens on port 9 (discard) of this machine.
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    assert convert(tmp_path, "--push-to-hub", "my-lab/first") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--push-to-hub my-lab/first: the hub does not respond, or rejects the token (" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("calls")
def test_without_a_token_or_the_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert convert(tmp_path, "--push-to-hub", "my-lab/first") == 2
    assert "set HF_TOKEN to one with write access, or run `hf auth login`" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert convert(tmp_path, "--push-to-hub", "my-lab/first") == 2
    assert "pip install huggingface_hub" in capsys.readouterr().err


def test_an_upload_that_fails_keeps_the_export_and_says_how_to_go_on(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: object, **_: Any) -> None:
        raise ConnectionResetError("Connection lost\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail, raising=False)
    train(tmp_path / "run", 1)
    assert convert(tmp_path, "--push-to-hub", "my-lab/first") == 2
    said = capsys.readouterr().err
    assert f"the upload failed (Connection lost); {tmp_path}/out is complete: upload it with `hf upload" in said
    assert (tmp_path / "out" / "config.json").exists()
    assert [name for name, _ in calls] == ["whoami", "create_repo"]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--push-to-hub", "first"], "must be ORG/NAME"),
        (["--push-to-hub", "../first"], "must be ORG/NAME"),
        (["--public"], "needs --push-to-hub"),
    ],
)
def test_options_of_the_hub_are_checked(
    tmp_path: Path, options: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, *options) == 2
    assert rule in capsys.readouterr().err
    assert convert(tmp_path, "--push-to-hub", "my-lab/first", target="mindspore") == 2
    assert "needs --to huggingface" in capsys.readouterr().err
