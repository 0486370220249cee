"""Tokenizers of other libraries' files, beside those libraries; and bytes."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import TokenizerConfig
from pangu.data.other_tokenizers import ENCODINGS, ByteTokenizer
from pangu.data.tokenizers import load_tokenizer
from tests.data.conftest import library_files

TEXT = "def f(x):\n    return '今天 是' + x's  12345 <|endoftext|> \t\n\n"
PIECES = [*(bytes([byte]) for byte in range(256)), b" r", b"et", b" ret", b"ur", b"urn", b" return", b"12", b"123"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of GPT-2's kind, as its two files and as a tokenizer.json; and a file of tiktoken's."""
    library = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    trained = library.ByteLevelBPETokenizer()
    texts = [path.read_text(encoding="utf-8") for path in library_files("textwrap.py", "heapq.py")]
    trained.train_from_iterator(texts, 400, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    trained._tokenizer.enable_truncation(5)
    trained._tokenizer.save(str(folder / "tokenizer.json"))
    lines = [base64.b64encode(piece) + f" {number}".encode() for number, piece in enumerate(PIECES)]
    (folder / "some.tiktoken").write_bytes(b"\n".join(lines))
    return folder


@pytest.mark.parametrize(("kind", "name"), [("gpt2", ""), ("huggingface", "tokenizer.json")])
def test_files_of_hugging_face(folder: Path, kind: str, name: str) -> None:
    """Whole texts, whatever the file says of their length, and no special id for what a text spells."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    tokenizer = load_tokenizer(TokenizerConfig(kind, str(folder / name)))
    plain = TEXT.replace("<|endoftext|>", "")
    assert tokenizer.encode(plain) == theirs.encode(plain)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert 0 not in ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 0)
    assert tokenizer.decode([0, 999, -1]) == "<|endoftext|>"


@pytest.mark.parametrize("kind", ENCODINGS)
def test_files_of_tiktoken(folder: Path, kind: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken_ext import openai_public

    tokenizer = load_tokenizer(TokenizerConfig(kind, str(folder / "some.tiktoken")))
    ranks = {piece: number for number, piece in enumerate(PIECES)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        facts = getattr(openai_public, kind)()
    theirs = tiktoken.Encoding(**{key: value for key, value in facts.items() if key != "explicit_n_vocab"})
    assert tokenizer.eod == facts["special_tokens"]["<|endoftext|>"]
    for text in (TEXT, "It's IT'S  we'll\r\n\n 1234567 ...!?\n x   ", "ÀÉîõ 你好，世界 Ǆǅǆ // http://a.b/c\n/"):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode_ordinary(text)
        assert tokenizer.decode([*ids, -1, 999_999]) == text
        assert max(ids) < len(PIECES)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes(text: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig("bytes"))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256, 300, -1]) == text


def test_half_a_character() -> None:
    assert ByteTokenizer().decode([228, 189]) == "\ufffd"


@pytest.mark.parametrize(
    "content", [b"", b"no base64", b"YQ== x", b"YQ== 99999999999999999", b"YQ== 1", b"\xff 1", b"Y 1"]
)
def test_damaged_files_of_tiktoken(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tiktoken")
    (tmp_path / "a.tiktoken").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.tiktoken: is not a tiktoken file"):
        load_tokenizer(TokenizerConfig("cl100k_base", str(tmp_path / "a.tiktoken")))


def test_damaged_files_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for content in ("", "{}", "[" * 9999, json.dumps({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer that"):
            load_tokenizer(TokenizerConfig("huggingface", str(tmp_path / "tokenizer.json")))
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(UserError, match=r"not found: .*merges\.txt"):
        load_tokenizer(TokenizerConfig("gpt2", str(tmp_path)))
    (tmp_path / "merges.txt").write_text("a")
    with pytest.raises(UserError, match="is not a tokenizer that"):
        load_tokenizer(TokenizerConfig("gpt2", str(tmp_path)))


@pytest.mark.parametrize(("kind", "library"), [("gpt2", "tokenizers"), ("cl100k_base", "tiktoken")])
def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"needs {library}: pip install {library}"):
        load_tokenizer(TokenizerConfig(kind, str(tmp_path)))


def test_a_file_of_another_programs_encoding_is_refused(tmp_path: Path) -> None:
    """Qwen's file of 151,643 pieces is not o200k_base, whose words end elsewhere."""
    pytest.importorskip("tiktoken")
    pieces = [bytes([byte]) for byte in range(256)] + [b"_" + str(i).encode() for i in range(151643 - 256)]
    lines = [base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(pieces)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"it has 151,643 pieces, but o200k_base has 199,998"):
        load_tokenizer(TokenizerConfig("o200k_base", str(tmp_path / "qwen.tiktoken")))
