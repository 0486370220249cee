"""Tokenizers: published test vectors, round trips, and files that are missing or of another kind."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from pathlib import Path

import jieba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import TokenizerConfig
from pangu.data.segmentation import Segmenter
from pangu.data.stdlib import StdlibPaths
from pangu.data.tokenizers import Tokenizer, load_tokenizer
from pangu.prepare.vocabulary import train_sentencepiece
from tests.data.conftest import library_files
from tests.spawn import repository

PANGU_MODEL = Path(__file__).resolve().parents[3] / "shared" / "reference" / "tokenizer" / "vocab.model"


@pytest.fixture(scope="module")
def pangu() -> Tokenizer:
    """PanGu-α's own tokenizer, where its file is at hand."""
    if not PANGU_MODEL.is_file():
        pytest.skip("PanGu-α's vocab.model is not here")
    return load_tokenizer(TokenizerConfig("pangu", str(PANGU_MODEL)))


@pytest.mark.parametrize(
    ("text", "ids", "decoded"),
    [
        ("今天是一个好天气", [465, 16, 46, 70, 2786], "今天是一个好天气"),
        (
            "你好，世界！\nHello world 123",
            [5772, 10, 267, 29, 13, 3, 2142, 12372, 4541, 13, 4, 13, 36475, 13, 4, 13779],
            "你好,世界!\nHello world 123",
        ),
        ("<eod>", [13, 1674, 2996, 14530, 716], "<eod>"),
    ],
)
def test_pangu_vectors(pangu: Tokenizer, text: str, ids: list[int], decoded: str) -> None:
    assert pangu.encode(text) == ids
    assert pangu.decode(ids) == decoded


def test_pangu_ends_documents_with_9(pangu: Tokenizer) -> None:
    assert (pangu.vocab_size, pangu.eod) == (40000, 9)


def test_padding_rows_decode_to_nothing(pangu: Tokenizer) -> None:
    assert pangu.decode([465, 40000, 40063, -1, 16]) == pangu.decode([465, 16])


def test_overlapping_words_come_once(pangu: Tokenizer) -> None:
    text = "中华人民共和国的北京大学生"
    assert pangu.decode(pangu.encode(text)) == text


def test_jieba_is_silent() -> None:
    program = "from pangu.data.tokenizers import jieba_segmenter; print(jieba_segmenter()('你好 世界'))"
    environment = {**os.environ, "PYTHONPATH": str(repository())}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert (done.stdout.decode().strip(), done.stderr) == ("你好 ▂ 世界", b"")


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_exact_round_trip(prepared: StdlibPaths, text: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(prepared.tokenizer)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(10))


@pytest.mark.parametrize("text", ["<eot>", "<pad> <s>", "▃▂", "a\tb\r\n\n  c ", " lead", "<0x41>", "\0"])
def test_no_text_spells_a_special_id(prepared: StdlibPaths, text: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(prepared.tokenizer)))
    ids = tokenizer.encode(text)
    assert min(ids) > 9
    assert tokenizer.decode(ids) == text


def test_trained_like_pangu(tmp_path: Path) -> None:
    """A vocabulary trained on jieba's words gives back spaces and newlines."""
    texts = ["今天 是\n一个 好天气", "good weather today\nand now", "明天 也是 好天气"]
    code = library_files("queue.py")[0].read_text(encoding="utf-8")
    path = tmp_path / "jieba.model"
    path.write_bytes(train_sentencepiece([*texts, code], 200, "unigram", coverage=1.0, jieba=True))
    tokenizer = load_tokenizer(TokenizerConfig("pangu", str(path)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (200, 9)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (ids.count(3), ids.count(4)) == (text.count("\n"), text.count(" "))


def test_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    core_library = pytest.importorskip("tokenizers")
    words = {"<|end|>": 0, "hello": 1, "world": 2, "?": 3}
    core = core_library.Tokenizer(core_library.models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = core_library.pre_tokenizers.Whitespace()
    core.post_processor = core_library.processors.TemplateProcessing("<|end|> $0", special_tokens=[("<|end|>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(TokenizerConfig("huggingface", str(tmp_path)))
    assert tokenizer.encode("hello world") == [1, 2]  # alone, without the id its own template puts before
    assert tokenizer.decode([1, 2, 77]) == "hello world"
    assert (tokenizer.vocab_size, tokenizer.eod) == (4, 0)


def test_hugging_face_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install"):
        load_tokenizer(TokenizerConfig("huggingface", str(tmp_path)))


@pytest.mark.parametrize("kind", ["sentencepiece", "pangu", "huggingface"])
def test_missing_files(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer.path = .*absent: (does not exist|no such folder)"):
        load_tokenizer(TokenizerConfig(kind, str(tmp_path / "absent")))


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "pointer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"pointer\.model: is not a valid SentencePiece model"):
        load_tokenizer(TokenizerConfig("sentencepiece", str(tmp_path / "pointer.model")))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for content in (None, "{}", '{"model": 1}', "[" * 9999, ""):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="cannot load a tokenizer from"):
            load_tokenizer(TokenizerConfig("huggingface", str(tmp_path)))


def test_an_empty_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.model").touch()
    with pytest.raises(UserError, match=r"empty\.model: is not a valid SentencePiece model"):
        load_tokenizer(TokenizerConfig("sentencepiece", str(tmp_path / "empty.model")))


def test_a_model_with_a_piece_that_is_no_text_is_named(prepared: StdlibPaths, tmp_path: Path) -> None:
    """The library opens it, and fails when it first decodes that piece."""
    content = prepared.tokenizer.read_bytes()
    piece = b"self"
    assert piece in content
    (tmp_path / "damaged.model").write_bytes(content.replace(piece, b"sel\xff"))
    with pytest.raises(UserError, match=r"damaged\.model: is not a valid SentencePiece model"):
        load_tokenizer(TokenizerConfig("sentencepiece", str(tmp_path / "damaged.model")))


def test_jieba_takes_no_dictionary_from_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user can have put one there, in which 今天 is no word."""
    planted = tmp_path / "jieba.cache"
    planted.write_bytes(marshal.dumps(({"今": 9, "天": 9}, 18)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("jieba.dt", jieba.Tokenizer())
    monkeypatch.setattr("jieba.cut", jieba.dt.cut)
    assert Segmenter()("今天是好天气") == "今天 是 好 天气"
    assert [path.name for path in tmp_path.iterdir()] == ["jieba.cache"]
