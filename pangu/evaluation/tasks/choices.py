"""Tasks that rank given answers by perplexity: the template is filled with each, and the most probable text wins.

Templates are those of the paper (table 7); tasks without one put the answer where it stood in the text. Where a text
has several blanks, each is one question, and the others are filled with what is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pangu.config.errors import UserError
from pangu.config.files import read_json
from pangu.evaluation.tasks.readers import json_lines
from pangu.evaluation.tasks.task import Item, Task


def _pairs(words: dict[str, str]) -> Callable[[Path], Iterator[Item]]:
    """Reader of sentence pairs; `words`: from the file's label to the word for it. Other labels (OCNLI's `-`: the
    annotators did not agree) are left out."""
    answers = tuple(words.values())

    def read(path: Path) -> Iterator[Item]:
        for number, value in json_lines(path):
            fields = {key: value[key] for key in ("sentence1", "sentence2")}
            if value["label"] in words:
                yield Item(f"{path.stem}-{number}", fields, answers, list(words).index(value["label"]))

    return read


def _labelled(description: str, word: Callable[[str], str] = str) -> Callable[[Path], Iterator[Item]]:
    """Reader of sentences with one of the labels of `labels.json` beside them, whose names stand under
    `description`."""

    def read(path: Path) -> Iterator[Item]:
        names = {label["label"]: word(label[description]) for _, label in json_lines(path.with_name("labels.json"))}
        for number, value in json_lines(path):
            right = list(names).index(value["label"])
            yield Item(f"{path.stem}-{number}", {"sentence": value["sentence"]}, tuple(names.values()), right)

    return read


_NEWS = {
    "news_story": "故事",
    "news_culture": "文化",
    "news_entertainment": "娱乐",
    "news_sports": "体育",
    "news_finance": "财经",
    "news_house": "房产",
    "news_car": "汽车",
    "news_edu": "教育",
    "news_tech": "科技",
    "news_military": "军事",
    "news_travel": "旅游",
    "news_world": "国际",
    "news_stock": "股票",
    "news_agriculture": "农业",
    "news_game": "电竞",
}
"""TNEWS names its classes in English."""


def _keywords(path: Path) -> Iterator[Item]:
    for number, value in json_lines(path):
        fields = {"passage": value["abst"], "keywords": "、".join(value["keyword"])}
        yield Item(f"{path.stem}-{number}", fields, ("不是", "是"), int(value["label"]))


def _pronouns(path: Path) -> Iterator[Item]:
    """The text as it is against the text with the noun in the place of the pronoun."""
    for number, value in json_lines(path):
        target, text = value["target"], value["text"]
        start, pronoun = target["span2_index"], target["span2_text"]
        if text[start : start + len(pronoun)] != pronoun:
            raise UserError(f"{path}, line {number + 1}: {pronoun} does not stand at character {start} of the text")
        fields = {"before": text[:start], "after": text[start + len(pronoun) :]}
        right = ("false", "true").index(value["label"])
        yield Item(f"{path.stem}-{number}", fields, (pronoun, target["span1_text"]), right)


def _idioms(path: Path) -> Iterator[Item]:
    """CLUE's ChID: passages with blanks #idiom000001#, ten candidates for each line, right ones in NAME_answer.json."""
    right = read_json(path.with_name(f"{path.stem}_answer.json"))
    for _, value in json_lines(path):
        candidates = tuple(value["candidates"])
        for text in value["content"]:
            answers = {blank: candidates[right[blank]] for blank in re.findall(r"#idiom\d+#", text)}
            for blank, answer in answers.items():
                yield Item(blank, _around(text, blank, answers), candidates, candidates.index(answer))


def _sentences(path: Path) -> Iterator[Item]:
    """CMRC 2019: passages with blanks [BLANK1], and the sentences that belong there, with some that do not."""
    for passage in read_json(path)["data"]:
        choices = tuple(passage["choices"])
        answers = {f"[BLANK{i + 1}]": choices[right] for i, right in enumerate(passage["answers"])}
        for blank, answer in answers.items():
            fields = _around(passage["context"], blank, answers)
            yield Item(f"{passage['context_id']}-{blank}", fields, choices, choices.index(answer))


def _around(text: str, blank: str, answers: dict[str, str]) -> dict[str, str]:
    """What stands before and after one blank of a text, the others filled."""
    before, after = text.split(blank)
    for other, answer in answers.items():
        before, after = before.replace(other, answer), after.replace(other, answer)
    return {"before": before, "after": after}


def _dialogues(path: Path) -> Iterator[Item]:
    for number, (lines, questions, *_) in enumerate(read_json(path)):
        for place, question in enumerate(questions):
            fields = {"passage": "".join(lines), "question": question["question"]}
            choices = tuple(question["choice"])
            yield Item(f"{path.stem}-{number}-{place}", fields, choices, choices.index(question["answer"]))


def _rank(name: str, read: Callable[[Path], Iterator[Item]], template: str, few: int, **more: Any) -> Task:
    files: dict[str, Any] = {"test": ("dev.json",), "train": ("train.json",)}
    return Task(name, read, "rank", template, few=few, **(files | more))


_BLANK = "{before}{answer}{after}"
_INFERENCE = {"entailment": "对", "neutral": "或许", "contradiction": "错"}

CHOICES = (
    _rank("afqmc", _pairs({"0": "不同", "1": "相同"}), "下面两个句子语义{answer}：{sentence1}。{sentence2}", 4),
    _rank("cmnli", _pairs(_INFERENCE), "{sentence1}？{answer}，{sentence2}", 6),
    _rank("ocnli", _pairs(_INFERENCE), "{sentence1}？{answer}，{sentence2}", 3, train=("train.json", "train.50k.json")),
    _rank("tnews", _labelled("label_desc", _NEWS.__getitem__), "这是关于{answer}的文章：{sentence}", 6, choices=4),
    _rank("iflytek", _labelled("label_des"), "这是关于{answer}的应用程序：{sentence}", 3, choices=4),
    _rank("csl", _keywords, "摘要：{passage}，关键词：{keywords}{answer}真实关键词", 10),
    _rank("cluewsc2020", _pronouns, _BLANK, 14),
    _rank("chid", _idioms, _BLANK, 3),
    _rank("cmrc2019", _sentences, _BLANK, 2, test=("*dev.json",), train=("*train.json",)),
    _rank(
        "c3",
        _dialogues,
        "问: {question}\n答:{answer}\n该答案来自对话: {passage}",
        3,
        test=("*[dm]-test*.json", "*[dm]-dev.json"),
        train=("*[dm]-train.json",),
    ),
)
