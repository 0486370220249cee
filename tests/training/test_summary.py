"""What a complete run says at its end."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

import pytest

from pangu.training.command import compose
from pangu.training.summary import summary_lines
from tests.configs import config
from tests.spawn import repository
from tests.training.test_resume import train

SUMMARY = {"steps": 5, "tokens": 10, "seconds": 1.0, "validation_loss": None, "validation_perplexity": None}


@pytest.mark.parametrize("world", ["1", "2"])
def test_the_next_commands_set_every_key_once(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["+config=quickstart", "optimizer=adam", "train.output=runs/a", "data.folder=/d", "train.steps=5"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *given])
    monkeypatch.setenv("WORLD_SIZE", world)
    said = summary_lines(config(*given), {**SUMMARY, "samples": []})
    launcher = "scripts/launch.py --nproc-per-node=2 " if world == "2" else ""
    commands = [line.strip() for line in said.splitlines() if f"{launcher}pretrain.py +config=quickstart" in line]
    assert len(commands) == 2
    for command in commands:
        assert command.startswith(f"python {launcher}pretrain.py")
        words = shlex.split(command.partition("pretrain.py ")[2])
        keys = [word.partition("=")[0].lstrip("+") for word in words]
        assert len(keys) == len(set(keys))
        assert compose(repository() / "configs", words)["data"]["folder"] == "/d"


def test_a_fine_tuned_model_can_be_asked_and_only_what_works_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["data=instructions", "data.train=[a.jsonl]", "data.tokenizer={kind: bytes}", "train.output=runs/a"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *given])
    said = summary_lines(config(*given, "checkpoint.init_from=runs/b"), {**SUMMARY, "samples": []})
    assert "scripts/generate.py runs/a --prompt Hello\n      answers\n" in said
    # bytes have no tokenizer of transformers: a command that exports this run would be refused
    assert "--to huggingface" not in said
    assert "tools/convert_checkpoint.py --help\n      exports for Hugging Face" in said
    assert "convert_checkpoint.py" not in summary_lines(config(*given), {**SUMMARY, "samples": []})


def test_a_run_without_a_tokenizer_offers_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py"])
    given = ["+config=quickstart", "sample.tokens=0", "train.output=runs/a"]
    assert "generate.py" in summary_lines(config(*given), {**SUMMARY, "samples": []})
    assert "generate.py" not in summary_lines(config(*given, "data=synthetic"), {**SUMMARY, "samples": []})


def test_sampled_text_is_text() -> None:
    said = summary_lines(config("train.output=a"), {**SUMMARY, "samples": ["def f():\n    return '今天'"]})
    assert "\nsampled:\n    def f():\n        return '今天'\n" in said


def test_a_run_keeps_the_information_of_libraries_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """matplotlib's `generated new fontManager`, where it has no cache yet."""
    train(tmp_path, 1, "checkpoint.every=0")
    capsys.readouterr()
    library = logging.getLogger("matplotlib.font_manager")
    library.info("generated new fontManager")
    library.warning("no font")
    logging.getLogger("pangu").info("a step")
    assert capsys.readouterr().err == "no font\na step\n"
