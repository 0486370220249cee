"""Catalogue of all tasks in one table, and readers of their files.

Templates, numbers of examples and decoding are those of the paper (PanGu-α, tables 7 and 8); ranked tasks without a
template put the answer where it stood in the text. Where a text has several blanks, each is one question, and the
others are filled with the right words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError
from pangu.common.files import read_json
from pangu.evaluation.generation import Sampling
from pangu.tasks.measures import begins_with, exact_match_and_f1, rouge
from pangu.tasks.task import Item, Task, json_lines, read_text

Reader = Callable[[Path], Iterator[Item]]
Fields = dict[str, str]


def find_task(name: str) -> Task:
    """Return the task of that name. Raises UserError, naming all tasks, if there is none."""
    if name not in TASKS:
        raise UserError(f"task {name}: unknown task; use one of {', '.join(TASKS)}")
    return TASKS[name]


def _each_line(question: Callable[[Any], tuple[Fields, tuple[str, ...], int] | None], words: int = 0) -> Reader:
    """Return the reader of a JSON-lines file.

    Args:
        question: Function from a line's value to the template's fields, the answers, and the index of the right
            one; None for a line without a question. Its ValueErrors are reported with file and line.
        words: Words of each answer, if perplexity per word is reported.
    """

    def read(path: Path) -> Iterator[Item]:
        for number, value in json_lines(path):
            try:
                entry = question(value)
            except ValueError as error:
                raise UserError(f"{path}, line {number + 1}: {error}") from error
            if entry is not None:
                yield Item(f"{path.stem}-{number}", *entry, words=words)

    return read


def _pairs(words: dict[str, str]) -> Reader:
    """Return the reader of sentence pairs; `words`: word of each label; others (OCNLI's `-`) are skipped."""

    def question(value: Any) -> tuple[Fields, tuple[str, ...], int] | None:
        fields = {key: value[key] for key in ("sentence1", "sentence2")}
        if value["label"] not in words:
            return None
        return fields, tuple(words.values()), list(words).index(value["label"])

    return _each_line(question)


def _labelled(description: str, words: dict[str, str] | None = None) -> Reader:
    """Return the reader of sentences with a label of `labels.json`, named by `description`; `words` for these names."""

    def read(path: Path) -> Iterator[Item]:
        labels = [label for _, label in json_lines(path.with_name("labels.json"))]
        names = tuple(words[label[description]] if words else label[description] for label in labels)
        numbers = {label["label"]: number for number, label in enumerate(labels)}
        yield from _each_line(lambda value: ({"sentence": value["sentence"]}, names, numbers[value["label"]]))(path)

    return read


def _keywords(value: Any) -> tuple[Fields, tuple[str, ...], int]:
    return {"passage": value["abst"], "keywords": "、".join(value["keyword"])}, ("不是", "是"), int(value["label"])


def _pronoun(value: Any) -> tuple[Fields, tuple[str, ...], int]:
    """Compare the text unchanged with the text whose pronoun is replaced by the noun."""
    target, text = value["target"], value["text"]
    start, pronoun = target["span2_index"], target["span2_text"]
    if text[start : start + len(pronoun)] != pronoun:
        raise ValueError(f"{pronoun} is not at character {start} of the text")
    fields = {"before": text[:start], "after": text[start + len(pronoun) :]}
    return fields, (pronoun, target["span1_text"]), ("false", "true").index(value["label"])


def _masked_word(value: Any) -> tuple[Fields, tuple[str, ...], int]:
    """Read WPLC: a text whose last sentence lacks its last word, `<mask>`."""
    before, mask, _ = value["masked_text"].partition("<mask>")
    if not mask:
        raise ValueError("masked_text has no <mask>")
    return {"before": before}, (value["correct_word"],), 0


def _last_word(value: Any) -> tuple[Fields, tuple[str, ...], int]:
    """Read LAMBADA as OpenAI processed it: one text per line, whose last word is asked for."""
    before, space, word = value["text"].rpartition(" ")
    return {"before": before}, (space + word,), 0


def _idioms(path: Path) -> Iterator[Item]:
    """Read CLUE's ChID: passages with blanks #idiom000001#, ten candidates per line, answers in NAME_answer.json."""
    right = read_json(path.with_name(f"{path.stem}_answer.json"))
    for _, value in json_lines(path):
        candidates = tuple(value["candidates"])
        for text in value["content"]:
            answers = {blank: candidates[right[blank]] for blank in re.findall(r"#idiom\d+#", text)}
            yield from _blanks(text, answers, candidates)


def _sentences(path: Path) -> Iterator[Item]:
    """Read CMRC 2019: passages with blanks [BLANK1], and sentences for them, some of which do not belong."""
    for passage in read_json(path)["data"]:
        choices = tuple(passage["choices"])
        answers = {f"[BLANK{i + 1}]": choices[right] for i, right in enumerate(passage["answers"])}
        yield from _blanks(passage["context"], answers, choices, f"{passage['context_id']}-")


def _blanks(text: str, answers: dict[str, str], candidates: tuple[str, ...], prefix: str = "") -> Iterator[Item]:
    """Yield a question for each blank of a text, the others filled; `answers`: right one by blank."""
    for blank, answer in answers.items():
        before, after = text.split(blank)
        for other, filling in answers.items():
            before, after = before.replace(other, filling), after.replace(other, filling)
        yield Item(prefix + blank, {"before": before, "after": after}, candidates, candidates.index(answer))


def _dialogues(path: Path) -> Iterator[Item]:
    for number, (lines, questions, *_) in enumerate(read_json(path)):
        for place, question in enumerate(questions):
            fields = {"passage": "".join(lines), "question": question["question"]}
            choices = tuple(question["choice"])
            yield Item(f"{path.stem}-{number}-{place}", fields, choices, choices.index(question["answer"]))


def _squad(path: Path) -> Iterator[Item]:
    """Read SQuAD's format, in which CMRC 2018 and DRCD are published; questions without an answer are skipped."""
    for article in read_json(path)["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                fields = {"document": paragraph["context"], "question": question["question"]}
                if answers := tuple(dict.fromkeys(answer["text"] for answer in question["answers"])):
                    yield Item(str(question["id"]), fields, answers)


def _dureader(path: Path) -> Iterator[Item]:
    """Read DuReader; the document is the selected paragraphs of search results, those the annotators used if known."""
    for _, value in json_lines(path):
        documents = [d for d in value["documents"] if d.get("is_selected")] or value["documents"]
        texts = [d["paragraphs"][d.get("most_related_para", 0)] for d in documents if d["paragraphs"]]
        if value["answers"]:
            fields = {"document": "\n".join(texts), "question": value["question"]}
            yield Item(str(value["question_id"]), fields, tuple(value["answers"]))


def _webqa(path: Path) -> Iterator[Item]:
    """Read WebQA's questions only, closed-book; those whose only evidence says `no_answer` are skipped."""
    for number, value in read_json(path).items():
        texts = [answer for evidence in value["evidences"].values() for answer in evidence["answer"]]
        if answers := tuple(dict.fromkeys(answer for answer in texts if answer != "no_answer")):
            yield Item(number, {"question": value["question"]}, answers)


def _cloze(path: Path) -> Iterator[Item]:
    """Read CMRC 2017, People Daily and Children's Fairy Tale, for a model that reads text and sentence up to the blank.

    Lines are `number ||| sentence`, words between spaces, then the sentence with the blank, with its answer after it
    or, under its number, in a file NAME.answer.
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
            raise UserError(f"{path}: {line[:60]}: expected a sentence with a blank XXXXX, and an answer")
        fields = {"document": "".join(sentences), "query": parts[0].split("XXXXX")[0]}
        yield Item(f"{path.name}-{number}", fields, (parts[1] if len(parts) > 1 else right[name],))
        number += 1


def _bars(line: str) -> list[str]:
    parts = (part.strip() for part in line.split("|||"))
    return [re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", part) for part in parts]


def _articles(path: Path) -> Iterator[Item]:
    """Read WikiText, cut at the titles of its articles, its signs joined to words again."""
    articles = re.split(r"(?m)^(?= = [^=].*[^=] = ?$)", read_text(path))
    for number, text in enumerate(article for article in articles if article.strip()):
        yield Item(f"{path.name}-{number}", {}, (_joined(text),), words=len(text.split()))


def _joined(text: str) -> str:
    """Undo WikiText's tokenization: ` @-@ ` is a hyphen, signs rejoin words (Radford et al. 2019, section 3.1)."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r' (["\']) (.*?) \1(?= |$)', r" \1\2\1", text, flags=re.MULTILINE)
    text = re.sub(r" ([.,:;!?%)\]}]|'s\b|n't\b)", r"\1", text)
    return re.sub(r"([(\[{$£€]) ", r"\1", text)


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
"""Chinese names of TNEWS's classes."""
_INFERENCE = {"entailment": "对", "neutral": "或许", "contradiction": "错"}
_BLANK = "{before}{answer}{after}"
_READING = "阅读文章：{document}\n问：{question}\n答：{answer}"
_AS_MANY_AS_FIT = 64
"""Number of examples larger than any window holds."""
_SQUAD_DECODING = Sampling(max_tokens=64, top_p=0.8, temperature=0.8)
_CLOZE_DECODING = Sampling(max_tokens=16, top_k=1, temperature=0.9)

_rank = partial(Task, method="rank", test=("dev.json",), train=("train.json",))
_read = partial(Task, method="write", template=_READING, shortened="document", measure=exact_match_and_f1)
_fill = partial(
    Task, method="write", template="{document}{query}{answer}", few=3, shortened="document", measure=begins_with
)

_ALL = (
    _rank("afqmc", _pairs({"0": "不同", "1": "相同"}), "下面两个句子语义{answer}：{sentence1}。{sentence2}", 4),
    _rank("cmnli", _pairs(_INFERENCE), "{sentence1}？{answer}，{sentence2}", 6),
    _rank("ocnli", _pairs(_INFERENCE), "{sentence1}？{answer}，{sentence2}", 3, train=("train.json", "train.50k.json")),
    _rank("tnews", _labelled("label_desc", _NEWS), "这是关于{answer}的文章：{sentence}", 6, choices=4),
    _rank("iflytek", _labelled("label_des"), "这是关于{answer}的应用程序：{sentence}", 3, choices=4),
    _rank("csl", _each_line(_keywords), "摘要：{passage}，关键词：{keywords}{answer}真实关键词", 10),
    _rank("cluewsc2020", _each_line(_pronoun), _BLANK, 14),
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
    _read(
        "cmrc2018", _squad, few=_AS_MANY_AS_FIT, test=("*dev*.json",), train=("*train*.json",), decoding=_SQUAD_DECODING
    ),
    _read(
        "drcd", _squad, few=_AS_MANY_AS_FIT, test=("*test*.json",), train=("*train*.json",), decoding=_SQUAD_DECODING
    ),
    _read(
        "dureader",
        _dureader,
        few=6,
        test=("zhidao.dev.json",),
        train=("zhidao.train.json",),
        decoding=Sampling(max_tokens=128, top_p=0.9, temperature=0.7),
        measure=rouge,
    ),
    _read(
        "webqa",
        _webqa,
        template="问：{question}\n答：{answer}",
        few=8,
        test=("*test.ann.json", "*validation.ann.json"),
        train=("*train.json",),
        decoding=Sampling(max_tokens=32, top_k=5),
        shortened="question",
    ),
    _fill("pd", _cloze, test=("pd.test*",), train=("pd.train*",), decoding=_CLOZE_DECODING),
    _fill("cft", _cloze, test=("cft.test.human*",), train=("cft.test.auto*",), decoding=_CLOZE_DECODING),
    _fill(
        "cmrc2017",
        _cloze,
        test=("cloze.test.doc_query", "cloze.valid.doc_query"),
        train=("*train*.doc_query",),
        decoding=Sampling(max_tokens=16, top_p=0.9),
    ),
    Task("wplc", _each_line(_masked_word), "{before}{answer}", method="word", test=("*test*.json*", "*dev*.json*")),
    Task("lambada", _each_line(_last_word, words=1), "{before}{answer}", method="word", test=("lambada_test*.jsonl",)),
    Task("wikitext", _articles, "{answer}", method="text", test=("wiki.test.*", "wiki.valid.*")),
)
TASKS = {task.name: task for task in _ALL}
