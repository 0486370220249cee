"""Tasks whose answers the model writes; decoding is that of the paper (table 8), templates those of table 7."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pangu.config.errors import UserError
from pangu.config.files import read_json
from pangu.evaluation.tasks.measures import begins_with, exact_match_and_f1, rouge
from pangu.evaluation.tasks.readers import json_lines, read_text
from pangu.evaluation.tasks.task import Decoding, Item, Task

_READING = "阅读文章：{document}\n问：{question}\n答：{answer}"


def _squad(path: Path) -> Iterator[Item]:
    """The format of SQuAD, in which CMRC 2018 and DRCD are published; questions without an answer are left out."""
    for article in read_json(path)["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                fields = {"document": paragraph["context"], "question": question["question"]}
                if answers := tuple(dict.fromkeys(answer["text"] for answer in question["answers"])):
                    yield Item(str(question["id"]), fields, answers)


def _dureader(path: Path) -> Iterator[Item]:
    """The document is the selected paragraphs of the search results, those that the annotators used if they say so."""
    for _, value in json_lines(path):
        documents = [d for d in value["documents"] if d.get("is_selected")] or value["documents"]
        texts = [d["paragraphs"][d.get("most_related_para", 0)] for d in documents if d["paragraphs"]]
        if value["answers"]:
            fields = {"document": "\n".join(texts), "question": value["question"]}
            yield Item(str(value["question_id"]), fields, tuple(value["answers"]))


def _webqa(path: Path) -> Iterator[Item]:
    """Only the questions, closed-book. Evidence without an answer says `no_answer`; questions with no other are left
    out."""
    for number, value in read_json(path).items():
        found = [answer for evidence in value["evidences"].values() for answer in evidence["answer"]]
        if answers := tuple(dict.fromkeys(answer for answer in found if answer != "no_answer")):
            yield Item(number, {"question": value["question"]}, answers)


def _cloze(path: Path) -> Iterator[Item]:
    """CMRC 2017, People Daily and Children's Fairy Tale: `number ||| sentence` lines, words between spaces, then the
    sentence with the blank, with its answer behind it or, under its number, in a file NAME.answer.

    The model reads the text, then the sentence up to the blank.
    """
    answer_file = path.with_suffix(".answer")
    right = dict(_bars(line) for line in read_text(answer_file).splitlines()) if answer_file.is_file() else {}
    sentences: list[str] = []
    number = 0
    for line in filter(str.strip, read_text(path).splitlines()):
        name, *parts = _bars(line)
        if name == "1":
            sentences = []
        if len(parts) == 1 and not name.startswith("<"):
            sentences.append(parts[0])
            continue
        if "XXXXX" not in parts[0] or (len(parts) == 1 and name not in right):
            raise UserError(f"{path}: {line[:60]}: a sentence with a blank XXXXX and an answer should stand here")
        fields = {"document": "".join(sentences), "query": parts[0].split("XXXXX")[0]}
        yield Item(f"{path.name}-{number}", fields, (parts[1] if len(parts) > 1 else right[name],))
        number += 1


def _bars(line: str) -> list[str]:
    """What stands between bars, without the spaces between Chinese words."""
    parts = (part.strip() for part in line.split("|||"))
    return [re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", part) for part in parts]


def _read(name: str, test: str) -> Task:
    return Task(
        name,
        _squad,
        "write",
        _READING,
        test=(test,),
        train=("*train*.json",),
        few=AS_MANY_AS_FIT,
        decoding=Decoding(max_tokens=64, top_p=0.8, temperature=0.8),
        measure=exact_match_and_f1,
        shortened="document",
    )


def _fill(name: str, test: tuple[str, ...], train: str, decoding: Decoding) -> Task:
    return Task(
        name,
        _cloze,
        "write",
        "{document}{query}{answer}",
        test=test,
        train=(train,),
        few=3,
        decoding=decoding,
        measure=begins_with,
        shortened="document",
    )


AS_MANY_AS_FIT = 64
"""More examples than a window holds."""

WRITTEN = (
    _read("cmrc2018", "*dev*.json"),
    _read("drcd", "*test*.json"),
    Task(
        "dureader",
        _dureader,
        "write",
        _READING,
        test=("zhidao.dev.json",),
        train=("zhidao.train.json",),
        few=6,
        decoding=Decoding(max_tokens=128, top_p=0.9, temperature=0.7),
        measure=rouge,
        shortened="document",
    ),
    Task(
        "webqa",
        _webqa,
        "write",
        "问：{question}\n答：{answer}",
        test=("*test.ann.json", "*validation.ann.json"),
        train=("*train.json",),
        few=8,
        decoding=Decoding(max_tokens=32, top_k=5),
        measure=exact_match_and_f1,
        shortened="question",
    ),
    _fill("pd", ("pd.test*",), "pd.train*", Decoding(max_tokens=16, top_k=1, temperature=0.9)),
    _fill("cft", ("cft.test.human*",), "cft.test.auto*", Decoding(max_tokens=16, top_k=1, temperature=0.9)),
    _fill(
        "cmrc2017",
        ("cloze.test.doc_query", "cloze.valid.doc_query"),
        "*train*.doc_query",
        Decoding(max_tokens=16, top_p=0.9),
    ),
)
