"""Batches against the rules of PanGu-α's data pipeline, written out index by index."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.config.data import PackingConfig
from pangu.data.batch import make_batch


def mask_and_positions(inputs: list[int], eod: int | None) -> tuple[list[list[bool]], list[int]]:
    """The mask starts as lower-triangular; for every index i that holds EOD: rows > i lose columns <= i, and position
    ids from i + 1 restart at 0."""
    size = len(inputs)
    mask = [[column <= row for column in range(size)] for row in range(size)]
    positions = list(range(size))
    for i in range(size):
        if inputs[i] == eod:
            for row in range(i + 1, size):
                for column in range(i + 1):
                    mask[row][column] = False
                positions[row] = row - (i + 1)
    return mask, positions


@settings(max_examples=80)
@given(
    samples=st.integers(1, 12).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 4), min_size=size + 1, max_size=size + 1), min_size=1, max_size=3)
    ),
    eod=st.sampled_from([None, 1]),
    pad=st.sampled_from([None, 2, 1]),
    reset_mask=st.booleans(),
    reset_positions=st.booleans(),
)
def test_against_the_rules(
    samples: list[list[int]], eod: int | None, pad: int | None, reset_mask: bool, reset_positions: bool
) -> None:
    indices = list(range(7, 7 + len(samples)))
    batch = make_batch(np.array(samples), indices, PackingConfig(eod, pad, reset_mask, reset_positions))
    assert batch.samples == tuple(indices)
    assert (batch.documents is not None) == (batch.bounds is not None) == reset_mask
    for row, sample in enumerate(samples):
        inputs, size = sample[:-1], len(sample) - 1
        mask, positions = mask_and_positions(inputs, eod)
        assert batch.tokens[row].tolist() == inputs
        assert batch.labels[row].tolist() == sample[1:]
        assert batch.weights[row].tolist() == [0.0 if token == pad else 1.0 for token in inputs]
        assert batch.positions[row].tolist() == (positions if reset_positions else list(range(size)))
        if batch.documents is not None:
            documents = batch.documents[row].tolist()
            same = [[c <= r and documents[r] == documents[c] for c in range(size)] for r in range(size)]
            assert same == mask
    if batch.documents is not None and batch.bounds is not None:
        begins = [i for i, (_, place) in enumerate(runs(batch.documents.tolist())) if place == 0]
        filled = batch.bounds.tolist()
        assert filled[: len(begins)] == begins
        assert set(filled[len(begins) :]) == {batch.tokens.numel()}
        assert math.log2(len(filled) - 1).is_integer()
        assert batch.bounds.dtype == torch.int32


def runs(documents: list[list[int]]) -> list[tuple[int, int]]:
    """Document and place in it, of every token of every row."""
    return [(row[i], row[:i].count(row[i])) for row in documents for i in range(len(row))]


def test_example_of_two_documents() -> None:
    """5 5 9 | 5 6: the EOD belongs to the document it ends, and padding loses its weight as an input only."""
    batch = make_batch(np.array([[5, 5, 9, 5, 6, 9]]), [0], PackingConfig(9, 6, True, True))
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.bounds is not None
    assert batch.bounds.tolist() == [0, 3, 5]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.weights.tolist() == [[1, 1, 1, 1, 0]]


def test_halves_are_the_batches_of_their_rows() -> None:
    """But for empty documents, which the bounds of either half have in place of the other's."""
    samples, packing = np.array([[5, 9, 5, 6, 9], [5, 5, 5, 5, 5], [9, 9, 5, 5, 5]]), PackingConfig(9, 6, True, True)
    for half, rows in zip(make_batch(samples, [4, 5, 6], packing).halves(), ([0, 1], [2]), strict=True):
        alone = make_batch(samples[rows], [4 + row for row in rows], packing)
        assert half.samples == alone.samples
        for name in ("tokens", "labels", "weights", "positions", "documents"):
            assert torch.equal(getattr(half, name), getattr(alone, name))
        assert half.bounds is not None
        assert alone.bounds is not None
        assert half.bounds.dtype == alone.bounds.dtype
        assert half.bounds.unique_consecutive().tolist() == alone.bounds.unique_consecutive().tolist()


@pytest.mark.parametrize("reset", [True, False])
def test_types_and_device(reset: bool) -> None:
    batch = make_batch(np.arange(12).reshape(2, 6), range(2), PackingConfig(9, 6, reset, reset))
    integers = [batch.tokens, batch.labels, batch.positions, *([] if batch.documents is None else [batch.documents])]
    assert all(tensor.dtype == torch.int64 and tensor.shape == (2, 5) for tensor in integers)
    assert batch.weights.dtype == torch.float32
    assert batch.samples == (0, 1)
    assert batch.to(torch.device("cpu")) is batch


def test_copies_wait_for_what_used_their_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been freed by another thread until it is allocated, while a kernel still reads it."""
    order: list[str] = []
    empty_like = torch.empty_like

    def allocate(like: torch.Tensor, device: object = "cpu", pin_memory: bool = False) -> torch.Tensor:
        order.append(str(device))
        return empty_like(like, device=torch.device(str(device)))

    def beside() -> nullcontext[None]:
        order.append("copies wait")
        return nullcontext()

    monkeypatch.setattr(torch, "empty_like", allocate)
    batch = make_batch(np.ones((2, 5), np.int64), (0, 1), PackingConfig(None, None, True, True))
    assert batch.to(torch.device("meta"), beside).labels.device.type == "meta"
    assert order.count("meta") >= 5
    assert order.index("copies wait") == len(order) - 1
