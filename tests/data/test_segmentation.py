"""Words as jieba itself gives them, for any text."""

from __future__ import annotations

import random
from functools import cache

import jieba
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pangu.data.segmentation import NEWLINE, SPACE
from pangu.data.tokenizers import jieba_segmenter
from tests.spawn import repository


@cache
def reference() -> jieba.Tokenizer:
    """jieba, without the cache that it would write to the folder for temporary files."""
    words = jieba.Tokenizer()
    words.FREQ, words.total = words.gen_pfdict(words.get_dict_file())
    words.initialized = True
    return words


def expected(text: str) -> str:
    """PanGu-α's preparation of text, as its authors wrote it down."""
    return " ".join(word.replace(" ", SPACE).replace("\n", NEWLINE) for word in reference().cut(text, cut_all=False))


@cache
def frequent() -> list[str]:
    """Words of the dictionary, the most frequent ones first."""
    return sorted(reference().FREQ, key=reference().FREQ.__getitem__, reverse=True)


HAN = st.characters(min_codepoint=0x4E00, max_codepoint=0x9FE0)
PARTS = st.one_of(
    st.deferred(lambda: st.sampled_from(frequent()[:20000])),
    st.deferred(lambda: st.sampled_from(frequent())),  # what only begins words, too
    st.text(HAN, max_size=6),
    st.text("ab19.%+-#&_ \r\n\t，。", max_size=6),
    st.text(max_size=3),
)


@settings(max_examples=100)
@given(st.lists(PARTS, max_size=30).map("".join))
@example("他来到了网易杭研大厦 C++\r\n3.14%的\u3000a-b")
@example("𠀀𠀁龥龦" * 40)
@example("\u9fc0\u9fd5丂\u9fcc丄\u9fc1" * 9)  # characters that the model knows nothing of: all states are alike
@example("\r\n \n\r")
def test_any_text(text: str) -> None:
    assert jieba_segmenter()(text) == expected(text)


def test_ties_and_near_ties() -> None:
    """Few characters, in many orders: many paths are equally likely but for rounding, and few words are remembered."""
    draw = random.Random(0)
    for seed in ("一丁七万丈三上下", "中国人民大学生活", "的了和是就都而及"):
        text = "".join(draw.choices(seed, k=1000))
        assert jieba_segmenter()(text) == expected(text)


@pytest.mark.parametrize("path", ["README.md", "README.zh.md", "docs/reproducibility.zh.md"])
def test_documents(path: str) -> None:
    text = (repository() / path).read_text(encoding="utf-8")
    assert jieba_segmenter()(text) == expected(text)
