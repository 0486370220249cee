"""scripts/generate.py as its users start it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import printable
from scripts.generate import main
from tests.end_to_end.commands import called, on_ranks
from tools.convert_checkpoint import main as convert

PROMPTS = ["def ", "import ", "盘古 é"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_prompts_from_a_file_to_a_file(
    axis: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three prompts at once on two processes, each as it is alone on one."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "new" / "texts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = ("--max-tokens", "12", "--top-k", "50", "--seed", "5")
    files = ("--prompts", str(prompts), "--output", str(output))
    done = on_ranks(2, "scripts/generate", folder, *files, f"--{axis}", "2", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    found = lines(output)
    assert [list(line) for line in found] == [["prompt", "text", "tokens", "end"]] * 3
    assert found[2]["prompt"] == "盘古 é"
    assert all(line["end"] == "length" and line["tokens"] == 12 for line in found)
    for prompt, line in zip(PROMPTS, found, strict=True):
        assert main([str(folder), "--prompt", prompt, *words]) == 0
        assert capsys.readouterr().out == f"{printable(line['prompt'] + line['text'])}\n"


def test_prompts_of_a_text_file_are_printed_one_after_the_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def\nimport\n")
    words = ("--max-tokens", "3", "--temperature", "0")
    assert main([str(folder), "--prompts", str(prompts), *words]) == 0
    together = capsys.readouterr().out
    assert main([str(folder), "--prompt", "def", "--prompt", "import", *words]) == 0
    assert capsys.readouterr().out == together
    assert together.startswith("def")
    assert "\n\nimport" in together


def test_the_samples_of_the_training_come_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-tokens", "4", "--temperature", "0.8", "--top-k", "50", "--seed", "1234")
    assert main([str(folder), "--prompt", "def ", *words]) == 0
    assert capsys.readouterr().out == json.loads((folder / "summary.json").read_text())["samples"][0] + "\n"


def test_an_exported_folder_says_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = str(tmp_path / "export")
    assert convert(["--from", "pangu", "--to", "huggingface", "--input", str(folder), "--output", export]) == 0
    capsys.readouterr()
    said = []
    for model in (str(folder), export):
        assert main([model, "--prompt", "def ", "--prompt", "盘古", "--max-tokens", "9", "--seed", "3"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


class Terminal(io.StringIO):
    """Keeps what can be read on it after each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.shown.append(self.getvalue())


def test_one_prompt_is_streamed_to_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text as without one: the prompt first, then as it is drawn."""
    words = [str(folder), "--prompt", "盘古", "--max-tokens", "20", "--temperature", "0"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main(words) == 0
    assert terminal.getvalue() == plain
    assert terminal.shown[0] == "盘古"
    assert len(set(terminal.shown)) > 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prompt", "a", "--top-p", "2"], " error: top_p = 2.0: must be above 0 and at most 1"),
        (["--prompt", "a", "--tensor", "2"], "needs 2 processes, got 1; start it with torchrun"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read"),
        (["--prompt", "word " * 40], "more than model.sequence = 32; shorten it"),
        (["--prompt", "a", "--output", "/proc/texts.jsonl"], "cannot write /proc/texts.jsonl"),
    ],
)
def test_bad_input_ends_in_one_message(
    folder: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), *words]) == 2
    assert expected in capsys.readouterr().err


def test_bad_prompts_and_folders_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert main([str(folder), "--prompts", str(prompts)]) == 2
    assert f"{prompts}, line 2: must be a JSON object like" in capsys.readouterr().err
    assert main([str(tmp_path), "--prompt", "a"]) == 2
    assert f" error: {tmp_path}: neither a run folder" in capsys.readouterr().err
    assert main(["Qwen/Qwen3-0.6B", "--prompt", "a"]) == 2
    assert " error: Qwen/Qwen3-0.6B: does not exist, and nothing is downloaded; " in capsys.readouterr().err


def test_only_the_first_of_several_processes_speaks(folder: Path) -> None:
    done = on_ranks(2, "scripts/generate", folder, "--prompt", "a", "--tensor", "2", "--pipeline", "3")
    assert done.returncode != 0
    assert done.stderr.count("needs 6 processes") == 1


def test_help_has_an_example() -> None:
    done = called("scripts/generate", "--help")
    assert done.returncode == 0
    assert "python scripts/generate.py runs/quickstart --prompt" in done.stdout
