"""From questions to tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pangu.tasks.catalogue import find_task
from pangu.tasks.prompts import Prompts, Setup
from pangu.tasks.scoring import ScoredSpan
from pangu.tasks.task import Item
from tests.evaluation.models import Characters

WORDS = Characters()
PAIR = Item("1", {"sentence1": "甲", "sentence2": "乙"}, ("对", "不对", "错"), 0)
POOL = [Item(str(i), {"sentence1": "丙" * i, "sentence2": "丁"}, ("对", "不对", "错"), i % 3) for i in range(2, 9)]


def prompts(name: str, window: int = 100, eod: int | None = 2, **setup: Any) -> Prompts:
    return Prompts(find_task(name), Setup(**setup), WORDS, eod, window, POOL)


def text(ids: tuple[int, ...] | list[int]) -> str:
    return "".join("|" if token == 2 else WORDS.decode([token]) for token in ids)


def cut(span: ScoredSpan) -> tuple[str, str]:
    """What is not scored, and what is."""
    return text(span.ids[: span.start]), text(span.ids[span.start :])


def test_the_whole_text_or_what_stands_behind_the_answer() -> None:
    assert [cut(span) for span in prompts("ocnli").spans(PAIR)] == [
        ("|", "甲？对，乙"),
        ("|", "甲？不对，乙"),
        ("|", "甲？错，乙"),
    ]
    rest = prompts("ocnli", scoring="rest")
    assert [cut(span) for span in rest.spans(PAIR)] == [("|甲？对", "，乙"), ("|甲？不对", "，乙"), ("|甲？错", "，乙")]
    # without an end of document the first token has nothing before it
    assert cut(prompts("ocnli", eod=None).spans(PAIR)[0]) == ("甲", "？对，乙")


def test_where_nothing_stands_behind_the_answer_the_whole_text_counts() -> None:
    item = Item("1", {"before": "甲乙", "after": ""}, ("丙", "丁"))
    assert [cut(span) for span in prompts("chid", scoring="rest").spans(item)] == [("|", "甲乙丙"), ("|", "甲乙丁")]


def test_only_the_word_counts_where_one_is_asked_for() -> None:
    item = Item("1", {"before": "one two"}, (" three",), words=1)
    assert [cut(span) for span in prompts("lambada").spans(item)] == [("|one two", " three")]


def test_tokens_that_reach_over_the_border_are_scored() -> None:
    """A tokenizer that joins letters: `two` after `one` is one token with it."""

    class Runs(Characters):
        def encode(self, text: str) -> list[int]:
            return [100 + len(word) for word in text.split(" ")]

    item = Item("1", {"before": "a bb"}, ("ccc",))
    span = replace(prompts("wplc"), tokenizer=Runs()).spans(item)[0]
    assert span == ScoredSpan((2, 101, 105), 2)


def test_examples_stand_before_with_their_right_answers_and_are_not_scored() -> None:
    spans = prompts("ocnli", shots=2).spans(PAIR)
    before = {cut(span)[0] for span in spans}
    assert [cut(span)[1] for span in spans] == ["甲？对，乙", "甲？不对，乙", "甲？错，乙"]
    assert len(before) == 1
    shown = before.pop().strip("|").splitlines()
    filled = [f"{item.fields['sentence1']}？{item.answers[item.right]}，丁" for item in POOL]
    assert len(set(shown)) == 2
    assert set(shown) < set(filled)


def test_examples_are_a_function_of_seed_task_and_question() -> None:
    def shown(name: str = "ocnli", item: Item = PAIR, **setup: Any) -> tuple[str, str]:
        return cut(prompts(name, shots=3, **setup).spans(item)[0])

    assert shown() == shown()
    others = [shown(seed=1), shown(name="cmnli"), shown(item=replace(PAIR, id="2"))]
    assert len({*others, shown()}) == 4
    # a larger number of examples begins with the same ones
    assert prompts("ocnli", shots=4).spans(PAIR)[0].ids[1:20] == prompts("ocnli", shots=3).spans(PAIR)[0].ids[1:20]


def test_examples_that_do_not_fit_are_left_out() -> None:
    """The longest text with its end of document has 7 tokens; each example at least 7 with its line break."""
    for window in (6, 12, 20, 40):
        spans = prompts("ocnli", window, shots=7).spans(PAIR)
        assert max(len(span.ids) for span in spans) <= window + 1
        assert [cut(span)[1] for span in spans] == ["甲？对，乙", "甲？不对，乙", "甲？错，乙"]
    assert len(prompts("ocnli", 6, shots=7).spans(PAIR)[1].ids) == 7
    assert len(prompts("ocnli", 40, shots=7).spans(PAIR)[1].ids) > 20


def test_a_text_that_is_too_long_keeps_the_answer_and_what_is_around_it() -> None:
    label_first = Item("1", {"sentence": "乙" * 50}, ("甲", "丁"))
    spans = prompts("tnews", 20).spans(label_first)
    assert all(len(span.ids) == 21 for span in spans)
    assert all(set(text(span.ids[-5:])) == {"乙"} for span in spans)
    assert spans[0].ids != spans[1].ids
    blank_inside = Item("1", {"before": "丙" * 50, "after": "乙" * 50}, ("甲", "丁"))
    assert [text(span.ids) for span in prompts("chid", 20).spans(blank_inside)] == [
        "丙" * 9 + "甲" + "乙" * 11,
        "丙" * 9 + "丁" + "乙" * 11,
    ]
    blank_last = Item("1", {"before": "丙" * 50, "after": ""}, ("甲", "丁"))
    assert [text(span.ids) for span in prompts("chid", 20).spans(blank_last)] == ["丙" * 20 + "甲", "丙" * 20 + "丁"]


def test_a_prompt_that_is_too_long_loses_the_end_of_its_document() -> None:
    """Of a window of 60, half is left for the answer."""
    item = Item("1", {"document": "文" * 99, "question": "甲"}, ("乙",))
    ids = prompts("cmrc2018", 60).prompt(item)
    assert len(ids) == 30
    found = text(ids)
    assert found.endswith("文文\n问：甲\n答：")
    assert found.startswith("|")
    # of a question alone the end remains
    assert text(prompts("webqa", 10).prompt(Item("1", {"question": "甲" * 20}, ("乙",)))).endswith("答：")


def test_a_prompt_ends_where_the_answer_stands() -> None:
    item = Item("1", {"document": "文", "question": "甲"}, ("乙", "丙"))
    assert text(prompts("cmrc2018", 200).prompt(item)).endswith("文章：文\n问：甲\n答：")


def test_wrong_labels_are_drawn_for_each_question() -> None:
    labels = tuple("甲乙丙丁是不对错")
    items = [Item(str(i), {"sentence": "问"}, labels, 5) for i in range(30)]
    narrowed = [prompts("tnews").narrowed(item) for item in items]
    assert narrowed == [prompts("tnews").narrowed(item) for item in items]
    assert all(len(item.answers) == len(set(item.answers)) == 4 for item in narrowed)
    assert all(item.answers[item.right] == "不" for item in narrowed)
    assert len({item.answers for item in narrowed}) > 10
    # all labels are drawn
    assert {answer for item in narrowed for answer in item.answers} == set(labels)
    assert prompts("ocnli").narrowed(PAIR) == PAIR


@pytest.mark.parametrize("stride", [None, 3])
def test_texts_are_cut_into_windows(stride: int | None) -> None:
    item = Item("1", {}, ("abcdefghijklmnop",))
    spans = prompts("wikitext", 8, stride=stride).spans(item)
    assert "".join(cut(span)[1] for span in spans) == "abcdefghijklmnop"
    assert [cut(span)[1] for span in spans][:2] == ["abcdefgh", "ijkl" if stride is None else "ijk"]
