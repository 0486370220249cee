"""Text that grows: whole characters only, and the reason why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pangu.common.errors import UserError
from pangu.evaluation.generation import Continuation, Sampling, continue_prompts, encode_prompts
from pangu.evaluation.inference import LoadedModel
from tests.evaluation import test_generation as ids
from tests.models.helpers import variant


class Bytes:
    """A tokenizer whose ids are bytes."""

    vocab_size = 256
    eod = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def model_that_says(text: str, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model whose draws are the bytes of a text, then the end of the document."""

    def draw(model, prompts, sampling, ended):
        said = [*text.encode()][: sampling.max_tokens]
        return ((number, token) for number in range(len(prompts)) for token in said)

    monkeypatch.setattr("pangu.evaluation.generation.draw", draw)
    return replace(ids.loaded(variant(vocab=256), eod=0), tokenizer=Bytes())


def test_only_whole_characters_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One to four bytes a character; what is told adds up to the text."""
    text = "aé盘𝄞 古b"
    told: list[tuple[int, str]] = []
    found = continue_prompts(
        model_that_says(text, monkeypatch), [[65], [66, 67]], Sampling(100), on_text=lambda *new: told.append(new)
    )
    assert [new for number, new in told if number == 0] == list(text)
    assert [new for number, new in told if number == 1] == list(text)
    assert [(part.prompt, part.text, part.tokens) for part in found] == [("A", text, 15), ("BC", text, 15)]


def test_a_text_ends_before_the_text_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of which is shown, while what only begins like it is."""
    told: list[str] = []
    model = model_that_says("a<b<|end|>c", monkeypatch)
    (found,) = continue_prompts(model, [[65]], Sampling(30, end="<|end|>"), on_text=lambda _, new: told.append(new))
    assert (found.text, found.end, told) == ("a<b", "stop", ["a", "<b"])


def test_a_text_that_ends_inside_a_character_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    model = model_that_says("a盘", monkeypatch)
    (found,) = continue_prompts(model, [[65]], Sampling(3), on_text=lambda _, new: told.append(new))
    assert "".join(told) == found.text == "a\ufffd"
    assert found.end == "length"


def test_why_a_text_ended() -> None:
    """Greedy, with one token of the text declared to be the end of document; 24 positions."""
    model = replace(ids.loaded(variant(vocab=256)), tokenizer=Bytes())
    prompts = [[65], [66] * 20]
    free = ids.generate(model, prompts, Sampling(30, 0.0))
    ends = [text.end for text in continue_prompts(model, prompts, Sampling(30, 0.0))]
    assert ends == ["window", "window"]
    assert [text.end for text in continue_prompts(model, prompts, Sampling(5, 0.0))] == ["length", "length"]
    stop = Sampling(30, 0.0, stop=(free[1][4],))
    assert continue_prompts(model, prompts[1:], stop)[0].end == "stop"
    assert continue_prompts(model, prompts[1:], stop)[0] == Continuation(
        "B" * 20, Bytes().decode(free[1][: free[1].index(free[1][4])]), free[1].index(free[1][4]), "stop"
    )


def test_an_empty_prompt_begins_behind_a_document() -> None:
    assert encode_prompts(["", "A"], Bytes(), 7, 24) == [[7], [65]]
    assert encode_prompts([""], Bytes(), None, 24) == [[0]]


def test_prompts_longer_than_the_window_are_named() -> None:
    with pytest.raises(UserError, match=r"^prompt 'AAAA': 4 tokens, more than model.sequence = 3; shorten it$"):
        encode_prompts(["AAA", "AAAA"], Bytes(), None, 3)


def test_prompts_that_are_no_text_are_named() -> None:
    """Bytes of a command line that are not UTF-8; a zero byte is a character as any other."""
    with pytest.raises(UserError, match=r"prompt 'a\\udcff': contains bytes that are not UTF-8"):
        encode_prompts(["fine", "a\udcff"], Bytes(), 0, 16)
    assert encode_prompts(["a\0b"], Bytes(), 0, 16) == [[97, 0, 98]]
