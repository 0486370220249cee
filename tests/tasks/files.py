"""Benchmarks' files in their published formats, a few lines of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIRS = [
    {"sentence1": "甲乙", "sentence2": "甲丙", "label": "1"},
    {"sentence1": "丁", "sentence2": "甲", "label": "0"},
    {"sentence1": "丙", "sentence2": "乙乙", "label": "1"},
]
INFERENCES = [
    {"sentence1": "甲", "sentence2": "乙", "label": "entailment"},
    {"sentence1": "甲", "sentence2": "丁", "label": "-"},
    {"sentence1": "甲", "sentence2": "丙", "label": "contradiction"},
]
NEWS_LABELS = [
    {"label": "100", "label_desc": "news_story"},
    {"label": "101", "label_desc": "news_culture"},
    {"label": "102", "label_desc": "news_entertainment"},
    {"label": "103", "label_desc": "news_sports"},
    {"label": "104", "label_desc": "news_finance"},
    {"label": "116", "label_desc": "news_game"},
]
NEWS = [
    {"label": "103", "label_desc": "news_sports", "sentence": "甲乙丙", "keywords": "甲"},
    {"label": "116", "label_desc": "news_game", "sentence": "丁", "keywords": ""},
]
APPLICATION_LABELS = [
    {"label": str(i), "label_des": name} for i, name in enumerate(["打车", "地图", "新闻", "漫画", "小说"])
]
APPLICATIONS = [{"label": "3", "label_des": "漫画", "sentence": "甲乙丙丁"}]
KEYWORDS = [{"id": 1, "abst": "甲乙丙", "keyword": ["甲", "丁"], "label": "0"}]
PRONOUNS = [
    {
        "target": {"span2_index": 3, "span1_index": 0, "span1_text": "甲乙", "span2_text": "他"},
        "idx": 0,
        "label": "true",
        "text": "甲乙问他丙",
    }
]
IDIOMS = [{"content": ["甲#idiom000001#乙#idiom000002#。"], "candidates": ["丙丙", "丁丁", "甲甲"]}]
IDIOM_ANSWERS = {"#idiom000001#": 1, "#idiom000002#": 0}
SENTENCES = {
    "data": [
        {
            "context": "甲[BLANK1]乙，[BLANK2]",
            "choices": ["丙", "丁", "错"],
            "context_id": "DEV_0",
            "answers": [1, 0],
        }
    ]
}
DIALOGUES = [[["女：甲", "男：乙"], [{"question": "丙？", "choice": ["甲", "乙", "丁"], "answer": "乙"}], "m1-1"]]
SQUAD = {
    "version": "v1.0",
    "data": [
        {
            "title": "甲",
            "paragraphs": [
                {
                    "id": "D0",
                    "context": "甲乙丙丁",
                    "qas": [
                        {
                            "question": "问？",
                            "id": "D0_Q0",
                            "answers": [
                                {"text": "乙丙", "answer_start": 1},
                                {"text": "乙丙", "answer_start": 1},
                                {"text": "丙", "answer_start": 2},
                            ],
                        }
                    ],
                }
            ],
        }
    ],
}
DUREADER = [
    {
        "documents": [
            {"is_selected": False, "title": "甲", "most_related_para": 0, "paragraphs": ["错"]},
            {"is_selected": True, "title": "乙", "most_related_para": 1, "paragraphs": ["甲", "乙丙"]},
        ],
        "question": "问",
        "question_id": 7,
        "question_type": "ENTITY",
        "answers": ["丙", "丙丁"],
    },
    {"documents": [{"paragraphs": ["甲"]}], "question": "问", "question_id": 8, "answers": []},
]
WEBQA = {
    "Q_1": {
        "question": "甲？",
        "evidences": {
            "Q_1#0": {"answer": ["乙"], "evidence": "甲 是 乙"},
            "Q_1#1": {"answer": ["no_answer"], "evidence": "丙"},
        },
    },
    "Q_2": {"question": "丙？", "evidences": {"Q_2#0": {"answer": ["no_answer"], "evidence": "丁"}}},
}
CLOZE = """1 ||| 甲 乙 ， abc def 丙 。
2 ||| 丁 是 XXXXX 。
3 ||| 丁 是 XXXXX 。 ||| 甲

1 ||| 丙 。
2 ||| XXXXX 问 。 ||| 丁
"""
CLOZE_2017 = "1 ||| 甲 乙 。\n<qid_0> ||| 甲 XXXXX 。\n1 ||| 丙 。\n<qid_1> ||| XXXXX 。\n"
CLOZE_2017_ANSWERS = "<qid_0> ||| 乙\n<qid_1> ||| 丙\n"
LONG_CONTEXT = [{"masked_text": "甲乙，丙<mask>。", "correct_word": "丁", "score": -1.0}]
LAST_WORDS = [{"text": "one two three"}, {"text": "four five"}]
WIKITEXT = (
    ' \n = First title = \n \n He said , " a @-@ b " ( c ) , 3 @,@ 000 . \n \n = = A section = = \n \n More . \n \n'
    " = Second = \n \n It 's done . \n"
)


def lines(values: Sequence[Any]) -> str:
    """One JSON value a line."""
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


FILES: dict[str, dict[str, str]] = {
    "afqmc": {"dev.json": lines(PAIRS), "train.json": lines(PAIRS * 2)},
    "cmnli": {"dev.json": lines(INFERENCES), "train.json": lines(INFERENCES)},
    "ocnli": {"dev.json": lines(INFERENCES), "train.50k.json": lines(INFERENCES)},
    "tnews": {"dev.json": lines(NEWS), "train.json": lines(NEWS * 3), "labels.json": lines(NEWS_LABELS)},
    "iflytek": {
        "dev.json": lines(APPLICATIONS),
        "train.json": lines(APPLICATIONS),
        "labels.json": lines(APPLICATION_LABELS),
    },
    "csl": {"dev.json": lines(KEYWORDS), "train.json": lines(KEYWORDS)},
    "cluewsc2020": {"dev.json": lines(PRONOUNS), "train.json": lines(PRONOUNS)},
    "chid": {"dev.json": lines(IDIOMS), "dev_answer.json": json.dumps(IDIOM_ANSWERS)},
    "cmrc2019": {"cmrc2019_dev.json": json.dumps(SENTENCES)},
    "c3": {"m-dev.json": json.dumps(DIALOGUES), "d-dev.json": json.dumps(DIALOGUES)},
    "cmrc2018": {"cmrc2018_dev.json": json.dumps(SQUAD), "cmrc2018_train.json": json.dumps(SQUAD)},
    "drcd": {"DRCD_test.json": json.dumps(SQUAD)},
    "dureader": {"zhidao.dev.json": lines(DUREADER)},
    "webqa": {"me_test.ann.json": json.dumps(WEBQA)},
    "pd": {"pd.test": CLOZE},
    "cft": {"cft.test.human": CLOZE, "cft.test.auto": CLOZE},
    "cmrc2017": {"cloze.valid.doc_query": CLOZE_2017, "cloze.valid.answer": CLOZE_2017_ANSWERS},
    "wplc": {"test.json": lines(LONG_CONTEXT)},
    "lambada": {"lambada_test.jsonl": lines(LAST_WORDS)},
    "wikitext": {"wiki.test.tokens": WIKITEXT},
}


def write_benchmarks(folder: Path) -> Path:
    """All of them, each in a folder of its name."""
    for task, files in FILES.items():
        (folder / task).mkdir()
        for name, text in files.items():
            (folder / task / name).write_text(text, encoding="utf-8")
    return folder
