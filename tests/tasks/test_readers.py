"""What is read from benchmarks' own files, and how it is put to a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.tasks.ask import Answer, Questions, read_questions
from pangu.tasks.catalogue import TASKS, find_task
from pangu.tasks.prompts import Setup
from pangu.tasks.results import PUBLISHED, AnswerFile
from pangu.tasks.task import SLOT
from tests.tasks.files import FILES, write_benchmarks


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    return write_benchmarks(tmp_path)


def read(name: str, folder: Path, **setup: int) -> Questions:
    return read_questions(find_task(name), folder / name, Setup(**setup))


# the texts that are compared, the right one first, and how many there are
FILLED = {
    "afqmc": ("下面两个句子语义相同：甲乙。甲丙", 3, 2),
    "cmnli": ("甲？对，乙", 2, 3),
    "ocnli": ("甲？对，乙", 2, 3),
    "tnews": ("这是关于体育的文章：甲乙丙", 2, 6),
    "iflytek": ("这是关于漫画的应用程序：甲乙丙丁", 1, 5),
    "csl": ("摘要：甲乙丙，关键词：甲、丁不是真实关键词", 1, 2),
    "cluewsc2020": ("甲乙问甲乙丙", 1, 2),
    "chid": ("甲丁丁乙丙丙。", 2, 3),
    "cmrc2019": ("甲丁乙，丙", 2, 3),
    "c3": ("问: 丙？\n答:乙\n该答案来自对话: 女：甲男：乙", 2, 3),
    "cmrc2018": ("阅读文章：甲乙丙丁\n问：问？\n答：乙丙", 1, 2),
    "drcd": ("阅读文章：甲乙丙丁\n问：问？\n答：乙丙", 1, 2),
    "dureader": ("阅读文章：乙丙\n问：问\n答：丙", 1, 2),
    "webqa": ("问：甲？\n答：乙", 1, 1),
    "pd": ("甲乙，abc def丙。丁是XXXXX。丁是甲", 2, 1),
    "cft": ("甲乙，abc def丙。丁是XXXXX。丁是甲", 2, 1),
    "cmrc2017": ("甲乙。甲乙", 2, 1),
    "wplc": ("甲乙，丙丁", 1, 1),
    "lambada": ("one two three", 2, 1),
    "wikitext": (
        ' = First title = \n \n He said, "a-b" (c), 3,000. \n \n = = A section = = \n \n More. \n \n',
        2,
        1,
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_first_question_as_a_model_reads_it(name: str, benchmarks: Path) -> None:
    text, questions, answers = FILLED[name]
    found = read(name, benchmarks)
    first = found.items[0]
    template = found.task.template
    for field, value in first.fields.items():
        template = template.replace(f"{{{field}}}", value)
    assert template.replace(SLOT, first.answers[first.right]) == text
    assert len(found.items) == questions
    assert len(first.answers) == answers
    assert len({item.id for item in found.items}) == questions


def test_every_task_has_files_and_every_published_figure_a_task() -> None:
    assert TASKS.keys() == FILES.keys() == FILLED.keys()
    assert TASKS.keys() > PUBLISHED.keys()
    assert len(PUBLISHED) == 18


def test_words_of_texts(benchmarks: Path) -> None:
    """WikiText's are those of its own tokenisation, LAMBADA asks for one."""
    assert [item.words for item in read("lambada", benchmarks).items] == [1, 1]
    assert [item.words for item in read("wikitext", benchmarks).items] == [28, 7]


def test_a_limit_takes_the_same_questions_each_time(benchmarks: Path) -> None:
    (benchmarks / "afqmc" / "dev.json").write_text(FILES["afqmc"]["dev.json"] * 10, encoding="utf-8")
    found = [item.id for item in read("afqmc", benchmarks, limit=5).items]
    assert found == [item.id for item in read("afqmc", benchmarks, limit=5).items]
    assert found == sorted(found, key=lambda name: int(name.split("-")[1]))
    assert len(set(found)) == 5
    assert found != [item.id for item in read("afqmc", benchmarks, limit=5, seed=1).items]


def test_errors_name_the_file_and_the_rule(benchmarks: Path) -> None:
    folder = benchmarks / "afqmc"
    with pytest.raises(UserError, match=r"task afqcm: unknown task; use one of afqmc, cmnli"):
        find_task("afqcm")
    with pytest.raises(UserError, match=r"shots = 7: .* has 6 training examples; use at most 6"):
        read("afqmc", benchmarks, shots=7)
    with pytest.raises(UserError, match=r"chid: no train.json here"):
        read("chid", benchmarks, shots=1)
    with pytest.raises(UserError, match=r"shots = 1: task wplc has no examples"):
        read("wplc", benchmarks, shots=1)
    (folder / "dev.json").write_text('{"sentence1": "a", "label": "0"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"dev\.json is not in the format of this benchmark \(KeyError: 'sentence2'\)"):
        read("afqmc", benchmarks)
    (folder / "dev.json").write_text('{"sentence1": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"dev\.json, line 1: not JSON"):
        read("afqmc", benchmarks)
    (folder / "dev.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"dev\.json is not UTF-8"):
        read("afqmc", benchmarks)
    (folder / "dev.json").unlink()
    with pytest.raises(UserError, match=r"afqmc: no dev\.json here"):
        read("afqmc", benchmarks)
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        read_questions(find_task("afqmc"), folder / "nowhere", Setup())


@pytest.mark.parametrize(
    "line", ['{"task": "a"}', "[1]", '{"task": 1, "id": "a", "response": null, "figures": {}}', "[" * 9999, '"a"', "3"]
)
def test_answers_of_another_command_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, {}).add("a", [Answer("1", None, {"right": 1.0})])
    whole = path.read_text()
    assert AnswerFile(path, {}).answers["a"]["1"].figures == {"right": 1.0}
    for content in (f"{whole}{line}\n{{}}\n", f"{line}\n{whole}"):
        path.write_text(content)
        with pytest.raises(UserError, match=r"answers\.jsonl, line \d"):
            AnswerFile(path, {})
