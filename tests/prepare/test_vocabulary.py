"""Training a vocabulary."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Literal

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.prepare.vocabulary import sampled, train_sentencepiece, training_sentences
from tests.data.conftest import library_files
from tests.spawn import repository

SPECIAL = ["<unk>", "<s>", "</s>", "▃", "▂", "<sep>", "<pad>", "<mask>", "<eod>", "<eot>"]
TEXTS = [path.read_text(encoding="utf-8") for path in library_files("ast.py", "argparse.py", "queue.py")]


def load(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("jieba", [False, True])
def test_special_ids_and_size(kind: Literal["bpe", "unigram"], jieba: bool) -> None:
    processor = load(train_sentencepiece(TEXTS, 500, kind, jieba=jieba))
    assert [processor.id_to_piece(i) for i in range(10)] == SPECIAL
    assert processor.vocab_size() == 500


def test_the_same_texts_give_the_same_model_in_every_process() -> None:
    program = (
        "import hashlib\n"
        "from pangu.prepare.vocabulary import train_sentencepiece\n"
        "from tests.prepare.test_vocabulary import TEXTS\n"
        "print(hashlib.sha256(train_sentencepiece(TEXTS, 500, 'bpe', max_sentences=50)).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repository(), capture_output=True, text=True, check=True)
    model = train_sentencepiece(iter(TEXTS), 500, "bpe", max_sentences=50)
    assert hashlib.sha256(model).hexdigest() == done.stdout.strip()
    assert model != train_sentencepiece(TEXTS, 500, "bpe", max_sentences=60)


def test_a_sample_is_drawn_evenly() -> None:
    assert sampled(range(5), 5) == sampled(range(5), 9) == list(range(5))
    drawn = sampled(range(10_000), 1000)
    assert len(set(drawn)) == 1000
    assert drawn == sampled(range(10_000), 1000)
    for start in range(0, 10_000, 1000):
        assert 50 < sum(start <= number < start + 1000 for number in drawn) < 150


def test_newlines_and_indentation_are_parts_of_pieces() -> None:
    processor = load(train_sentencepiece(TEXTS, 600, "bpe"))
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    assert any("\n▁▁▁▁" in piece for piece in pieces)


@given(text=st.text("ab\n\t", max_size=60), limit=st.integers(1, 12))
def test_sentences_hold_the_whole_text_but_tabs(text: str, limit: int) -> None:
    sentences = list(training_sentences(text, limit))
    assert "".join(sentences) == text.replace("\t", "")
    assert all(0 < len(sentence) <= limit for sentence in sentences)


def test_sentences_are_cut_before_a_newline() -> None:
    assert list(training_sentences("ab\ncd\nefghijk", 6)) == ["ab\ncd", "\nefghi", "jk"]


@pytest.mark.parametrize(
    ("texts", "vocab", "words"),
    [
        ([], 400, "no text"),
        (["\t", ""], 400, "no text"),
        (["hello there"], 5000, r"5000 pieces needs more text; use at most \d+ pieces"),
        (TEXTS, 200, r"200 pieces is too small.*at least \d+"),
    ],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_plain_words_for_errors(texts: list[str], vocab: int, words: str, kind: Literal["bpe", "unigram"]) -> None:
    with pytest.raises(UserError, match=words):
        train_sentencepiece(texts, vocab, kind)


def test_the_bounds_in_the_messages_work() -> None:
    with pytest.raises(UserError) as too_large:
        train_sentencepiece(["hello there"], 5000, "bpe")
    most = int(str(too_large.value).split("at most ")[1].split()[0])
    assert load(train_sentencepiece(["hello there"], most, "bpe")).vocab_size() == most
    with pytest.raises(UserError) as too_small:
        train_sentencepiece(TEXTS, 200, "bpe")
    least = int(str(too_small.value).split("at least ")[1].split()[0])
    assert load(train_sentencepiece(TEXTS, least, "bpe")).vocab_size() == least
