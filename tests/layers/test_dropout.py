"""Dropout masks are a hash of (seed, step, place, sample, position, element)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from pangu.collectives.regions import TensorRegion
from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.topology.placement import PlacementTable
from pangu.topology.random import random_key

KEYS = DropoutKeys(seed=1, step=2, samples=(10, 11, 12))


def dropout(probability: float, place: str = "here", region: TensorRegion | None = None) -> Dropout:
    return Dropout(Builder(PlacementTable(), region=region or TensorRegion()), probability, place)


def on(keys: DropoutKeys, length: int) -> DropoutKeys:
    return keys.on(torch.zeros(len(keys.samples), length))


def hidden(x: Tensor, probability: float, keys: DropoutKeys, place: str = "here") -> Tensor:
    return dropout(probability, place).hidden(x, on(keys, len(x)))


def wrapped(number: int, bits: int = 32) -> int:
    """As a signed integer of so many bits."""
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def is_kept(key: int, sample: int, position: int, column: int, probability: float) -> bool:
    """What dropout_masks.py says, in whole numbers of any size."""
    z = ((sample << 32) + position) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    row = (z ^ z >> 31) ^ key % 2**64
    mixed = wrapped((row ^ 0x9E3779B1 * (8 * (column // 32) + column % 8)) % 2**32 * (row >> 32 | 1))
    factor = (0x2C1B3C6D, 0x297A2D39, 0x7FEB352D, 0x31848BAB)[column // 8 % 4]
    return wrapped((mixed ^ mixed >> 16) * factor) >= round(probability * 2**32) - 2**31


def test_the_hash_is_the_one_written_down() -> None:
    """And so the same on every device and in every version: a run can go on where another left off."""
    mask = hidden(torch.ones(5, 3, 80), 0.3, KEYS, "there") > 0
    key = random_key(KEYS.seed, KEYS.step, "there") - 2**63
    for position, (row, sample) in ((4, (2, 12)), (0, (0, 10))):
        assert mask[position, row].tolist() == [is_kept(key, sample, position, i, 0.3) for i in range(80)]
    assert mask.unique().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_format_does_not_change_the_mask(dtype: torch.dtype) -> None:
    x = torch.ones(6, 3, 50)
    assert torch.equal(hidden(x.to(dtype), 0.5, KEYS) > 0, hidden(x, 0.5, KEYS) > 0)


def test_a_rank_drops_what_one_process_drops_in_its_part() -> None:
    """Its slice of the sequence, and its heads."""
    x, scores = torch.ones(6, 3, 4), torch.ones(3, 4, 6, 6)
    keys = on(KEYS, 6)
    whole, of_heads = dropout(0.5).hidden(x, keys), dropout(0.5).probabilities(scores, keys)
    ranks = [dropout(0.5, region=TensorRegion(rank, 2, sequence=True)) for rank in range(2)]
    assert torch.equal(torch.cat([rank.hidden(x[:3], keys) for rank in ranks]), whole)
    assert torch.equal(torch.cat([rank.probabilities(scores[:, :2], keys) for rank in ranks], 1), of_heads)
    alone = dropout(0.5, region=TensorRegion(1, 2))
    assert torch.equal(alone.hidden(x, keys), whole)


def test_a_row_has_the_same_mask_in_any_micro_batch() -> None:
    x = torch.ones(5, 3, 7)
    parts = [hidden(x[:, i : i + 1], 0.5, replace(KEYS, samples=(10 + i,))) for i in range(3)]
    assert torch.equal(hidden(x, 0.5, KEYS), torch.cat(parts, 1))


def test_what_a_cpu_does_in_blocks_is_what_it_does_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any strides."""
    x, residual = torch.randn(3, 11, 7).transpose(0, 1), torch.randn(11, 3, 7)
    keys, layer = on(KEYS, 11), dropout(0.5)
    whole = layer.hidden(x, keys, residual)
    monkeypatch.setattr("pangu.layers.dropout_masks._BLOCK", 16)
    assert torch.equal(layer.hidden(x, keys, residual), whole)


def test_backward_drops_the_same_and_the_residual_is_added() -> None:
    x, residual = (torch.randn(9, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layer, keys = dropout(0.25), on(KEYS, 9)
    mask = layer.hidden(torch.ones_like(x), keys)
    y = layer.hidden(x, keys, residual)
    torch.testing.assert_close(y, residual + x * mask)
    gradient = torch.randn_like(y)
    for mine, theirs in zip(torch.autograd.grad(y, (x, residual), gradient), (gradient * mask, gradient), strict=True):
        torch.testing.assert_close(mine, theirs)


def standardized(
    keys: DropoutKeys, probability: float, place: str = "here", shape: tuple[int, int] = (256, 384)
) -> Tensor:
    """(dropped - p) / sqrt(p (1 - p)) [samples, positions, columns], independent numbers of mean 0 and variance 1."""
    length, width = shape
    dropped = hidden(torch.ones(length, len(keys.samples), width, dtype=torch.float64), probability, keys, place) == 0
    return ((dropped.double() - probability) / (probability * (1 - probability)) ** 0.5).transpose(0, 1)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_share_is_right_in_all_and_in_each_row_and_column(probability: float) -> None:
    for mask in standardized(KEYS, probability):
        assert abs(float(mask.sum())) < 4.5 * mask.numel() ** 0.5
        for dim in (0, 1):
            sums = mask.sum(dim) / mask.shape[dim] ** 0.5
            assert float(sums.abs().max()) < 5.5
            # their variance is 1, known to sqrt(2 / n)
            assert abs(float(sums.square().mean()) - 1) < 5 * (2 / sums.numel()) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_row_or_column_is_like_another_at_any_distance(probability: float) -> None:
    """Every two rows, every two columns, and every two-dimensional frequency: its power is exponential of mean 1."""
    mask = standardized(replace(KEYS, samples=(3,)), probability)[0]
    for x in (mask, mask.t()):
        products = (x @ x.t() / x.shape[1] ** 0.5)[torch.ones(len(x), len(x)).triu(1).bool()]
        assert float(products.abs().max()) < 7  # tails are longer than the normal's where few are dropped
        assert abs(float(products.square().mean()) - 1) < 6 * (2 / len(products)) ** 0.5
    power = torch.fft.rfft2(mask).abs()[:, 1:-1].square() / mask.numel()
    assert float(power.max()) < 20  # exp(-20) x 50,000


def test_places_steps_seeds_and_samples_have_nothing_in_common() -> None:
    keys = [KEYS, replace(KEYS, seed=2), replace(KEYS, step=3), replace(KEYS, samples=(13, 14, 15))]
    masks = [standardized(each, 0.5, shape=(64, 128)) for each in keys] + [standardized(KEYS, 0.5, "there", (64, 128))]
    flat = [sample.flatten() for mask in masks for sample in mask]
    assert all(abs(float(a @ b)) < 5 * len(a) ** 0.5 for a, b in combinations(flat, 2))


def test_share_and_scale() -> None:
    y = hidden(torch.ones(1000, 3, 100), 0.1, KEYS)
    assert float((y == 0).float().mean()) == pytest.approx(0.1, abs=0.003)  # 5 standard errors
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.9)]


def test_evaluation_drops_nothing() -> None:
    x, residual = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    assert dropout(0.5).hidden(x, None) is x
    assert dropout(0.0).hidden(x, KEYS) is x
    assert torch.equal(dropout(0.5).hidden(x, None, residual), x + residual)
