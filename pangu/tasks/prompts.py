"""Conversion of questions to tokens: templates, examples, and truncation to the window."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pangu.data.tokenizers import Tokenizer
from pangu.tasks.scoring import ScoredSpan, huggingface_windows, windows
from pangu.tasks.task import SLOT, Item, Task
from pangu.topology.random import generator


@dataclass(frozen=True)
class Setup:
    """Settings of a task."""

    shots: int = 0
    """Number of examples before each question, fewer where they do not fit."""
    seed: int = 0
    """Seed of examples, of wrong labels where not all are ranked, of sampled answers, and of the questions that a limit
    leaves."""
    scoring: Literal["text", "rest"] = "text"
    """Text whose perplexity ranks an answer: `text`: the full filled template, as the paper says; `rest`: only the part
    after the answer, as the code of the paper does (the full text, where nothing follows)."""
    limit: int | None = None
    """Largest number of questions, taken at random; None: all."""
    stride: int | None = None
    """Stride of the window over a long text, in tokens; None: half of it."""
    recipe: Literal["own", "huggingface"] = "own"
    """Recipe of text perplexity. `own`: each token counts once, after the end of another document; `huggingface`: as in
    transformers' documentation (see `huggingface_windows`), with the ids that transformers gives a text."""


@dataclass(frozen=True)
class Prompts:
    """Converter of one task's questions to prompts and spans for a model."""

    task: Task
    setup: Setup
    tokenizer: Tokenizer
    first: int | None
    """Id before each text, as in training: the beginning of a text or the end of another; without one the first token
    of a text is not scored."""
    window: int
    """Longest input of the model, in tokens."""
    pool: Sequence[Item] = ()
    """Items that examples are taken from."""
    bos: int | None = None
    """Id of the beginning of a text, if the tokenizer adds one."""

    def narrowed(self, item: Item) -> Item:
        """Return the item with as many answers as the task ranks, the right one among them."""
        number = self.task.choices or len(item.answers)
        wrong = [i for i in range(len(item.answers)) if i != item.right]
        source = generator(self.setup.seed, "answers", self.task.name, item.id)
        numbers = sorted([item.right, *source.permutation(wrong)[: number - 1].tolist()])
        return replace(item, answers=tuple(item.answers[i] for i in numbers), right=numbers.index(item.right))

    def spans(self, item: Item) -> list[ScoredSpan]:
        """Return one span per answer; for a text, those of its windows."""
        if self.task.method == "text":
            stride = self.setup.stride or max(1, self.window // 2)
            if self.setup.recipe == "huggingface":
                before = [] if self.bos is None else [self.bos]
                ids = [*before, *self.tokenizer.encode(item.answers[0])]
                return list(huggingface_windows(ids, self.window, stride))
            return list(windows(self._encode(item.answers[0]), self.window, stride))
        head, tail = (_filled(part, item.fields) for part in self.task.template.split(SLOT))
        longest = max(len(self._encode(head + answer + tail)) for answer in item.answers)
        shown = self._examples(item, self.window + 1 - longest)
        return [self._span(shown, head, answer, tail) for answer in item.answers]

    def prompt(self, item: Item) -> list[int]:
        """Return the ids of the prompt, with room for the answer."""
        assert self.task.decoding is not None
        room = self.window - min(self.task.decoding.max_tokens, self.window // 2)
        template, _ = self.task.template.split(SLOT)
        fields = dict(item.fields)
        shown = self._examples(item, room - len(self._encode(_filled(template, fields))))
        while True:
            ids = self._encode(shown + _filled(template, fields))
            excess = len(ids) - room
            if excess <= 0 or not fields[self.task.shortened]:
                return ids[-room:]
            fields[self.task.shortened] = fields[self.task.shortened][:-excess]

    def _encode(self, text: str) -> list[int]:
        return [*([] if self.first is None else [self.first]), *self.tokenizer.encode(text)]

    def _examples(self, item: Item, room: int) -> str:
        """Return examples of other questions with right answers, each followed by a line break, while they fit."""
        source = generator(self.setup.seed, "examples", self.task.name, item.id)
        shown = ""
        for place in source.permutation(len(self.pool))[: self.setup.shots]:
            example = self.pool[place]
            fields = {**example.fields, "answer": example.answers[example.right]}
            longer = f"{shown}{_filled(self.task.template, fields)}\n"
            if len(self._encode(longer)) > room:
                break
            shown = longer
        return shown

    def _span(self, shown: str, head: str, answer: str, tail: str) -> ScoredSpan:
        ids = self._encode(shown + head + answer + tail)

        def place(text: str) -> int:
            """Return the index of the first token that does not belong to the text alone."""
            alone = self._encode(text)
            same = (one == other for one, other in zip(alone, ids, strict=False))
            return max(1, next((i for i, equal in enumerate(same) if not equal), min(len(alone), len(ids))))

        # What counts, for each way of scoring:       examples | head | answer | tail
        #   the full text (the paper's words)                     ^-------------------
        #   a word                                                       ^-------
        #   what follows the answer (the paper's code)                            ^---
        # A token may join characters of two parts: it belongs to the later one.
        begin, rest = place(shown), place(shown + head + answer)
        if self.task.method == "word":
            begin = place(shown + head)
        elif self.setup.scoring == "rest" and rest < len(ids):
            begin = rest
        # the answer and the text around it remain
        room = self.window + 1
        cut = max(0, min(rest - room // 2, len(ids) - room))
        return ScoredSpan(tuple(ids[cut : cut + room]), max(1, begin - cut))


def chosen(items: Sequence[Item], task: Task, setup: Setup) -> list[Item]:
    """Return the questions to ask: all, or as many as the limit allows, taken at random and kept in order."""
    if setup.limit is None or setup.limit >= len(items):
        return list(items)
    places = generator(setup.seed, "questions", task.name).permutation(len(items))[: setup.limit]
    return [items[place] for place in sorted(places.tolist())]


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda slot: fields[slot[1]], template)
