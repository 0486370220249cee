"""Log-likelihoods of given tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pangu.tasks.scoring import Score, ScoredSpan, huggingface_windows, score, windows
from pangu.topology.layout import Layout
from pangu.topology.random import generator
from tests.evaluation.models import random_model
from tests.threads import Ranks
from tests.weights import whole_logits

LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=2, sequence=True),
    Layout(pipeline=2),
    Layout(data=2),
    Layout(tensor=2, data=2, zero=3),
    Layout(pipeline=2, data=2),
]


def spans() -> list[ScoredSpan]:
    """Of every length that fits, and of a length at which nothing counts; the number of micro-batches is odd."""
    source = generator("spans")
    lengths = [17, 2, 9, 16, 5, 5, 12, 3, 1, 17, 7, 8, 11, 10]
    drawn = [tuple(source.integers(0, 101, size=length).tolist()) for length in lengths]
    return [ScoredSpan(ids, 1 + place % max(1, len(ids) - 1)) for place, ids in enumerate(drawn)]


def scores(rank: int, world: int, layout: Layout, kind: str = "pangu") -> list[Score]:
    """On one rank of a layout."""
    return score(random_model(layout, f"model.kind={kind}"), spans())


def test_scores_are_those_of_whole_logits() -> None:
    """Each span alone, from the logits of all words."""
    asked = spans()
    model = random_model(Layout())
    likeliest = [list(span.ids) for span in asked]
    for (span, found), best in zip(zip(asked, score(model, asked), strict=True), likeliest, strict=True):
        if not span.num_scored:
            assert found == Score(0.0, True, 0)
            continue
        tokens = torch.tensor([span.ids[:-1]])
        with torch.no_grad():
            positions = torch.arange(tokens.shape[1])[None]
            logits = whole_logits(model.runner.model, tokens, positions)[:, 0]
        labels = torch.tensor(span.ids[1:])
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")[span.start - 1 :]
        assert found.loss == pytest.approx(float(losses.sum()), rel=1e-12)
        assert found.tokens == len(losses)
        assert found.greedy == bool((logits.argmax(-1) == labels)[span.start - 1 :].all())
        best[-1] = int(logits[-1].argmax())
    # what greedy decoding would write is found to be so, and what it would not is not
    last = [ScoredSpan(tuple(ids), len(ids) - 1) for ids in likeliest if len(ids) > 1]
    assert all(found.greedy for found in score(model, last))
    assert not all(found.greedy for found in score(model, asked) if found.tokens)


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_every_layout_gives_the_same_scores(kind: str) -> None:
    """To rounding in fp64, on every rank."""
    one = scores(0, 1, Layout(), kind)
    for layout in LAYOUTS:
        for found in Ranks().run(layout.world, scores, layout, kind):
            assert [(s.greedy, s.tokens) for s in found] == [(s.greedy, s.tokens) for s in one]
            assert [s.loss for s in found] == pytest.approx([s.loss for s in one], rel=1e-12), layout


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_windows_score_every_token_but_the_first_once(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    ids = list(range(length))
    found = list(windows(ids, window, stride))
    assert [token for span in found for token in span.ids[span.start :]] == ids[1:]
    for span in found:
        assert len(span.ids) <= window + 1
        first = span.ids[span.start] if span.num_scored else 1
        # sees all that is before it, or at least window - stride tokens besides the one that it follows
        assert span.start >= min(first, window - stride + 1)
        assert span.ids == tuple(range(span.ids[0], span.ids[-1] + 1))


@pytest.mark.parametrize(("length", "stride"), [(16, 4), (30, 8), (33, 8), (33, 16), (40, 15), (5, 8)])
def test_the_recipe_of_hugging_face(length: int, stride: int) -> None:
    """Label by label as its documentation goes about it: labels shifted by one, those seen before left out, a mean for
    each window, weighted by the number of new tokens less one."""
    ids = generator("recipe", length).integers(0, 101, size=length).tolist()
    model = random_model(Layout())
    total, count, seen = 0.0, 0, 0
    for begin in range(0, length, stride):
        end = min(begin + 16, length)
        tokens = torch.tensor([ids[begin:end]])
        labels = tokens.clone()
        labels[:, : -(end - seen)] = -100
        positions = torch.arange(tokens.shape[1])[None]
        with torch.no_grad():
            logits = whole_logits(model.runner.model, tokens, positions)[:-1, 0]
        if end - seen > 1:
            total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:])) * (end - seen - 1)
            count += end - seen - 1
        seen = end
        if end == length:
            break
    found = score(model, list(huggingface_windows(ids, 16, stride)))
    assert sum(one.tokens for one in found) == count
    assert sum(one.loss for one in found) == pytest.approx(total, rel=1e-12)
