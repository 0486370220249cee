"""Text drawn from a model."""

from __future__ import annotations

import pytest
import torch

from pangu.config.schema import SampleConfig
from pangu.evaluation.generation import continue_text, next_token_scores, pick
from pangu.layers.deferred import WeightGradients
from pangu.pipeline.runner import Runner
from pangu.pipeline.schedule import make_schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.models.helpers import TINY, make

CPU = torch.device("cpu")


class Numbers:
    """A tokenizer whose text is a list of numbers."""

    vocab_size = TINY.vocab
    eod = 9

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def draw(
    prompt: str, temperature: float = 1.0, top_k: int = 5, seed: int = 0, multiple: int = 1, tokens: int = 40
) -> str:
    model, _ = make(seed=5)
    config = SampleConfig(tokens, (), temperature, top_k)
    arguments = {"seed": seed, "window": TINY.sequence, "eod": 9, "device": CPU, "multiple": multiple}
    schedule = make_schedule("1f1b", 1, 1, 1)
    runner = Runner(model, {0: model.parts[0]}, 0, "rank 0", None, torch.float32, WeightGradients())
    scores = next_token_scores(runner, schedule, TINY.vocab, Mesh(Layout(), 0, CPU))
    return continue_text(scores, Numbers(), prompt, config, **arguments)


def test_the_same_seed_draws_the_same_text_and_another_another() -> None:
    assert draw("1 2 3") == draw("1 2 3")
    assert draw("1 2 3") != draw("1 2 3", seed=1)
    assert draw("1 2 3").startswith("1 2 3 ")


def test_padding_behind_the_text_changes_nothing() -> None:
    """24 positions and 43 tokens: also where the window slides."""
    assert draw("1 2 3") == draw("1 2 3", multiple=4)


def test_greedy_takes_the_most_probable_token() -> None:
    assert draw("1 2 3", temperature=0.0) == draw("1 2 3", temperature=0.0, seed=8) == draw("1 2 3", top_k=1, seed=3)


def test_an_empty_prompt_begins_at_the_end_of_a_document() -> None:
    assert draw("", tokens=3).split()


def test_top_k_and_temperature() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    source = torch.Generator().manual_seed(0)
    drawn = [pick(logits, 1.0, 2, source) for _ in range(2000)]
    assert set(drawn) == {1, 2}
    # e^3 / (e^3 + e^2) = 0.731; 5 standard errors of 0.01
    assert drawn.count(1) / 2000 == pytest.approx(0.731, abs=0.05)
    assert {pick(logits, 1.0, 0, source) for _ in range(2000)} == {0, 1, 2, 3}
    assert {pick(logits, 0.01, 0, source) for _ in range(200)} == {1}
