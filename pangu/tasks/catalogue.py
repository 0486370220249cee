"""Catalogue of all tasks, which tasks.yaml lists, and readers of their files.

Templates, numbers of examples and decoding are those of the paper (PanGu-α, tables 7 and 8); ranked tasks without a
template put the answer where it stood in the text. Where a text has several blanks, each is one question, and the
others are filled with the right words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pangu.common.errors import UserError
from pangu.common.files import read_json
from pangu.evaluation.generation import Sampling
from pangu.tasks.measures import begins_with, exact_match_and_f1, rouge
from pangu.tasks.task import Item, Task, json_lines, read_text

Reader = Callable[..., Iterator[Item]]
_Entry = tuple[dict[str, str], tuple[str, ...], int]
"""Fields of the template, answers, and the index of the right one."""


def find_task(name: str) -> Task:
    """Return the task of that name. Raises UserError, naming all tasks, if there is none."""
    if name not in TASKS:
        raise UserError(f"task {name}: unknown task; use one of {', '.join(TASKS)}")
    return TASKS[name]


def _each_line(question: Callable[..., _Entry | None]) -> Reader:
    """Return the reader of a JSON-lines file.

    `question`: function from a line's value to its entry, or None for a line without a question. Its ValueErrors are
    reported with file and line. `words` of the reader: words of each answer, if perplexity per word is reported.
    """

    def read(path: Path, words: int = 0, **options: Any) -> Iterator[Item]:
        for number, value in json_lines(path):
            try:
                entry = question(value, **options)
            except ValueError as error:
                raise UserError(f"{path}, line {number + 1}: {error}") from error
            if entry is not None:
                yield Item(f"{path.stem}-{number}", *entry, words=words)

    return read


@_each_line
def _pairs(value: Any, words_of: Mapping[str, str]) -> _Entry | None:
    """Read a pair of sentences; `words_of`: word of each label; others (OCNLI's `-`) are skipped."""
    fields = {key: value[key] for key in ("sentence1", "sentence2")}
    if value["label"] not in words_of:
        return None
    return fields, tuple(words_of.values()), list(words_of).index(value["label"])


def _labelled(path: Path, description: str, words_of: Mapping[str, str] | None = None) -> Iterator[Item]:
    """Read sentences with a label of labels.json, named by `description`; `words_of`: words for these names."""
    labels = [label for _, label in json_lines(path.with_name("labels.json"))]
    names = tuple(words_of[label[description]] if words_of else label[description] for label in labels)
    numbers = {label["label"]: number for number, label in enumerate(labels)}
    return _each_line(lambda value: ({"sentence": value["sentence"]}, names, numbers[value["label"]]))(path)


@_each_line
def _keywords(value: Any) -> _Entry:
    return {"passage": value["abst"], "keywords": "、".join(value["keyword"])}, ("不是", "是"), int(value["label"])


@_each_line
def _pronoun(value: Any) -> _Entry:
    """Compare the text unchanged with the text whose pronoun is replaced by the noun."""
    target, text = value["target"], value["text"]
    start, pronoun = target["span2_index"], target["span2_text"]
    if text[start : start + len(pronoun)] != pronoun:
        raise ValueError(f"{pronoun} is not at character {start} of the text")
    fields = {"before": text[:start], "after": text[start + len(pronoun) :]}
    return fields, (pronoun, target["span1_text"]), ("false", "true").index(value["label"])


@_each_line
def _masked_word(value: Any) -> _Entry:
    """Read WPLC: a text whose last sentence lacks its last word, `<mask>`."""
    before, mask, _ = value["masked_text"].partition("<mask>")
    if not mask:
        raise ValueError("masked_text has no <mask>")
    return {"before": before}, (value["correct_word"],), 0


@_each_line
def _last_word(value: Any) -> _Entry:
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


_READERS: Mapping[str, Reader] = {
    "pairs": _pairs,
    "labelled": _labelled,
    "keywords": _keywords,
    "pronoun": _pronoun,
    "idioms": _idioms,
    "sentences": _sentences,
    "dialogues": _dialogues,
    "squad": _squad,
    "dureader": _dureader,
    "webqa": _webqa,
    "cloze": _cloze,
    "masked_word": _masked_word,
    "last_word": _last_word,
    "articles": _articles,
}
_MEASURES = {"begins_with": begins_with, "exact_match_and_f1": exact_match_and_f1, "rouge": rouge}


def _load() -> Iterator[Task]:
    entries = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8"))
    for name, entry in entries.items():
        if not name.startswith("_"):
            read = partial(_READERS[entry.pop("read")], **entry.pop("options", {}))
            if "measure" in entry:
                entry["measure"] = _MEASURES[entry["measure"]]
                entry["decoding"] = Sampling(**entry["decoding"])
            yield Task(name, read, **entry)


TASKS = {task.name: task for task in _load()}
