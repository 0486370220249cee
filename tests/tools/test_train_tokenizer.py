"""tools/train_tokenizer.py as its users start it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pangu.config.data import TokenizerConfig
from pangu.data.tokenizers import load_tokenizer
from tests.data.conftest import library_files
from tests.prepare.test_preprocess_data import tool


def train(output: Path, *arguments: object) -> None:
    done = tool("--output", output, *arguments, name="train_tokenizer")
    assert done.returncode == 0, done.stderr
    assert f"{output}.model" in done.stdout


def test_exact_kind(tmp_path: Path) -> None:
    source = library_files("argparse.py")[0].read_text(encoding="utf-8")
    (tmp_path / "in.jsonl").write_text(json.dumps({"body": source}))
    train(tmp_path / "new" / "t", "--input", tmp_path, "--text-key", "body", "--vocab-size", 700)
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(tmp_path / "new" / "t.model")))
    assert (tokenizer.vocab_size, tokenizer.eod) == (700, 9)
    assert tokenizer.decode(tokenizer.encode(source)) == source
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.model"]


def test_pangu_kind(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("今天 是一个好天气\n明天也是\n\nwhat good weather\n" * 3, encoding="utf-8")
    options = ["--jieba", "--model-type", "unigram", "--character-coverage", 1, "--vocab-size", 33]
    train(tmp_path / "t", "--input", tmp_path / "in.txt", *options)
    tokenizer = load_tokenizer(TokenizerConfig("pangu", str(tmp_path / "t.model")))
    assert (tokenizer.vocab_size, tokenizer.eod) == (33, 9)
    assert tokenizer.decode(tokenizer.encode("今天 是\n一个 good weather")) == "今天 是\n一个 good weather"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "/nowhere"], "--input /nowhere: no such file or folder"),
        (["--input", "{tmp}/blank.txt"], "there is no text to train a tokenizer on"),
        (["--vocab-size", "100000"], "a vocabulary of 100000 pieces needs more text; use at most"),
        (["--vocab-size", "100"], "a vocabulary of 100 pieces is too small"),
        (["--vocab-size", "-5"], "--vocab-size -5: must be at least 1"),
        (["--character-coverage", "0.5"], "--character-coverage 0.5: must be from 0.98 to 1"),
        (["--max-sentences", "0"], "--max-sentences 0: must be at least 1"),
        (["--output", "/dev/null/t"], "cannot write /dev/null/t.model"),
        (["--output", "{tmp}/old"], "old.model exists already"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n\n")
    (tmp_path / "in.txt").write_text("some text\n")
    (tmp_path / "old.model").write_text("precious")
    given = ["--input", tmp_path / "in.txt", "--output", tmp_path / "t", "--vocab-size", 300]
    done = tool(*given, *[argument.format(tmp=tmp_path) for argument in arguments], name="train_tokenizer")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.txt", "in.txt", "old.model"]
    assert (tmp_path / "old.model").read_text() == "precious"
