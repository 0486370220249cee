"""Answers and figures of tasks, with a model whose probabilities are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import UserError
from pangu.data.batch import Batch
from pangu.evaluation.generation import Sampling
from pangu.evaluation.inference import LoadedModel
from pangu.tasks import ask as module
from pangu.tasks.ask import Answer, Questions, ask, read_questions, summary
from pangu.tasks.catalogue import TASKS, find_task
from pangu.tasks.prompts import Setup
from pangu.tasks.scoring import Score, ScoredSpan
from pangu.tasks.task import Item, Task
from pangu.topology.layout import Layout
from tests.evaluation.models import Characters, random_model
from tests.tasks.files import write_benchmarks
from tests.threads import Ranks

COSTS = {"甲": 1.0, "乙": 2.0, "丙": 3.0, "丁": 4.0}
"""Nats of a character; others cost half a nat."""


class Wide(Characters):
    """All characters of the tests, by their code point."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(sign) for sign in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i - 3) for i in ids if i >= 3)


def by_character(model: LoadedModel, spans: Sequence[ScoredSpan]) -> list[Score]:
    """A model that knows nothing but how often each character is written; it would always write 三."""
    found = []
    for span in spans:
        scored = Wide().decode(span.ids[span.start :])
        found.append(Score(sum(COSTS.get(sign, 0.5) for sign in scored), set(scored) <= set(" three"), len(scored)))
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model with a window of 1,000 that scores by character."""
    monkeypatch.setattr(module, "score", by_character)
    return random_model(Layout(), "model.sequence=1000", tokenizer=Wide())


def answers(model: LoadedModel, folder: Path, name: str, **setup: Any) -> list[Answer]:
    questions = read_questions(find_task(name), write_benchmarks(folder) / name, Setup(**setup))
    by_id = {answer.id: answer for some in ask(model, questions) for answer in some}
    return [by_id[item.id] for item in questions.items]


# by hand: mean nats per character of each filled template, and which is lowest
@pytest.mark.parametrize(
    ("name", "said", "accuracy"),
    [
        # 不同 and 相同 cost the same
        ("afqmc", ["不同", "不同", "不同"], 100 / 3),
        # 甲？对，乙: (1 + 3 * .5 + 2) / 5 = .9; 或许 has one more cheap character: 5 / 6; 甲？或许，丙: 6 / 6
        ("ocnli", ["或许", "或许"], 0.0),
        # 不是 has more cheap characters than 是
        ("csl", ["不是"], 100.0),
        # 甲乙问他丙: 7 / 5 = 1.4; 甲乙问甲乙丙: 9.5 / 6 = 1.58
        ("cluewsc2020", ["他"], 0.0),
        # the second idiom's passage has 丁丁 for the first: 甲甲 is cheapest each time
        ("chid", ["甲甲", "甲甲"], 0.0),
        # 甲_乙，丙 and 甲丁乙，_: 错 costs .5
        ("cmrc2019", ["错", "错"], 0.0),
        ("c3", ["甲", "甲"], 0.0),
    ],
)
def test_the_lowest_perplexity_is_chosen(
    known: LoadedModel, tmp_path: Path, name: str, said: list[str], accuracy: float
) -> None:
    found = answers(known, tmp_path, name)
    assert [answer.response for answer in found] == said
    assert summary(found) == pytest.approx({"accuracy": accuracy})


def test_scoring_the_rest_leaves_the_answer_out(known: LoadedModel, tmp_path: Path) -> None:
    """Behind the answer the texts are the same, so that the first of equal ones is taken; where the blank ends the
    text, the whole counts."""
    found = answers(known, tmp_path, "cmrc2019", scoring="rest")
    assert [answer.response for answer in found] == ["丙", "错"]


def test_perplexity_of_words(known: LoadedModel, tmp_path: Path) -> None:
    """丁 costs 4 nats and is one token."""
    (found,) = answers(known, tmp_path, "wplc")
    assert found.figures == {"loss": 4.0, "tokens": 1.0, "words": 0.0, "accuracy": 0.0}
    assert summary([found]) == pytest.approx({"accuracy": 0.0, "perplexity": math.exp(4)})


def test_questions_of_like_length_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many short texts and a few long ones, in any order; what each gets is what it gets alone."""
    texts = [("ab" * (3 + number * 37 % 60 * (number % 5 == 0)))[:64] for number in range(60)]
    items = [Item(str(number), {}, (text,)) for number, text in enumerate(texts)]
    task = Task("texts", lambda _: iter(()), "{answer}", method="text")
    model = random_model(Layout(), "model.sequence=64", "model.vocab=200", tokenizer=Wide(), rows=2)
    computed: list[int] = []
    forward = model.runner.forward

    def counting(schedule: Any, batches: Sequence[Batch], *rest: Any) -> Any:
        computed.extend(batch.tokens.numel() for batch in batches)
        return forward(schedule, batches, *rest)

    monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(model.runner, "forward", counting)
    together = {answer.id: answer for some in ask(model, Questions(task, Setup(), items, [])) for answer in some}
    assert sum(computed) < 1.1 * sum(map(len, texts))
    for item in items:
        ((alone,),) = ask(model, Questions(task, Setup(), [item], []))
        assert together[item.id].figures == pytest.approx(alone.figures, rel=1e-12)


def test_last_words(known: LoadedModel, tmp_path: Path) -> None:
    """` three` and ` five` are 6 and 5 characters of half a nat; the model would write the first one only."""
    found = answers(known, tmp_path, "lambada")
    assert summary(found) == pytest.approx(
        {"accuracy": 50.0, "perplexity": math.exp(0.5), "word_perplexity": math.exp(5.5 / 2)}
    )


def test_texts(known: LoadedModel, tmp_path: Path) -> None:
    """Half a nat for each character, which is a byte; 35 words."""
    found = answers(known, tmp_path, "wikitext")
    size = sum(int(answer.figures["bytes"]) for answer in found)
    assert size > 80
    assert summary(found) == pytest.approx(
        {
            "perplexity": math.exp(0.5),
            "word_perplexity": math.exp(size / 2 / 35),
            "bits_per_byte": 0.5 / math.log(2),
        }
    )


@pytest.mark.parametrize(
    ("name", "written", "said", "figures"),
    [
        ("cmrc2018", "乙丙。\n问", ["乙丙。"], {"exact_match": 100.0, "f1": 100.0}),
        # 甲乙丙 against 乙丙: 2 of 3 and of 2
        ("drcd", " 甲乙丙", ["甲乙丙"], {"exact_match": 0.0, "f1": 80.0}),
        # 丁丙 against 丙丁: both in common; against 丙 a subsequence of 1: 2.44 * .5 / (1 + .72)
        ("dureader", "丁丙", ["丁丙"], {"rouge_1": 100.0, "rouge_l": 122 / 1.72}),
        ("webqa", "\n乙", ["乙"], {"exact_match": 100.0, "f1": 100.0}),
        ("pd", "甲是", ["甲是", "甲是"], {"accuracy": 50.0}),
        ("cft", "丁", ["丁", "丁"], {"accuracy": 50.0}),
        ("cmrc2017", "问", ["问", "问"], {"accuracy": 0.0}),
    ],
)
def test_written_answers(
    known: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    written: str,
    said: list[str],
    figures: dict[str, float],
) -> None:
    """Everything up to the end of the line counts; decoding is the paper's."""
    asked: list[Sampling] = []

    def generate(model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        asked.append(sampling)
        return [Wide().encode(written) for _ in prompts]

    monkeypatch.setattr(module, "generate_shared", generate)
    found = answers(known, tmp_path, name, seed=7)
    assert [answer.response for answer in found] == said
    assert summary(found) == pytest.approx(figures)
    published = {"cmrc2018": (0.8, 0, 0.8), "drcd": (0.8, 0, 0.8), "dureader": (0.7, 0, 0.9), "webqa": (1.0, 5, 1.0)}
    published |= {"pd": (0.9, 1, 1.0), "cft": (0.9, 1, 1.0), "cmrc2017": (1.0, 0, 0.9)}
    assert [(one.temperature, one.top_k, one.top_p) for one in asked] == [published[name]]
    assert (asked[0].seed, asked[0].stop) == (7, (3 + ord("\n"),))


def test_what_is_answered_is_not_asked_again(known: LoadedModel, tmp_path: Path) -> None:
    questions = read_questions(find_task("afqmc"), write_benchmarks(tmp_path) / "afqmc", Setup())
    assert [answer.id for some in ask(known, questions, ["dev-1"]) for answer in some] == ["dev-0", "dev-2"]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task afqmc: the model has no tokenizer"):
        answers(random_model(Layout()), tmp_path, "afqmc")


def measure(rank: int, world: int, layout: Layout, folder: Path, names: Sequence[str]) -> dict[str, list[Answer]]:
    """All tasks on one rank of a layout, two texts at a time."""
    model = random_model(layout, "model.sequence=64", tokenizer=Characters(), rows=2)
    setup = Setup(stride=5)
    found = {name: read_questions(find_task(name), folder / name, setup) for name in names}
    return {name: [answer for some in ask(model, found[name]) for answer in some] for name in names}


def test_every_layout_gives_the_same_answers(tmp_path: Path) -> None:
    """Chosen, written and scored, on every rank; losses to rounding in fp64."""
    names = list(TASKS)
    one = measure(0, 1, Layout(), write_benchmarks(tmp_path), names)
    for layout in (Layout(tensor=2), Layout(pipeline=2), Layout(data=2)):
        for found in Ranks().run(2, measure, layout, tmp_path, names):
            for name in names:
                assert [(a.id, a.response) for a in found[name]] == [(a.id, a.response) for a in one[name]]
                for ours, theirs in zip(found[name], one[name], strict=True):
                    assert ours.figures == pytest.approx(theirs.figures, rel=1e-12), (layout, name)
