"""Who sees whom, by hand."""

from __future__ import annotations

import torch

from pangu.layers.masks import AttentionMask

CPU = torch.device("cpu")


def test_causal() -> None:
    assert AttentionMask().dense(range(3), range(3), CPU).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
    assert AttentionMask().is_plain_causal


def test_documents() -> None:
    allowed = AttentionMask(torch.tensor([[0, 0, 1, 1]])).dense(range(4), range(4), CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_window_counts_the_query_itself() -> None:
    allowed = AttentionMask(window=2).dense(range(4), range(4), CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert not AttentionMask(window=2).is_plain_causal


def test_window_and_documents_of_two_rows() -> None:
    allowed = AttentionMask(torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]]), window=2).dense(range(4), range(4), CPU)[:, 0]
    assert allowed[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert allowed[1].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
