"""Dropout masks are a function of (seed, step, place, sample)."""

from __future__ import annotations

import pytest
import torch

from pangu.collectives.regions import TensorRegion
from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.topology.placement import PlacementTable

KEYS = DropoutKeys(seed=1, step=2, samples=(10, 11, 12))


def dropout(
    x: torch.Tensor, probability: float, keys: DropoutKeys | None, place: str, batch_dim: int = 1
) -> torch.Tensor:
    return Dropout(Builder(PlacementTable()), probability, place, batch_dim, None)(x, keys)


@pytest.mark.parametrize("dim", [0, 2])
def test_a_rank_drops_what_one_process_drops_in_its_part(dim: int) -> None:
    x = torch.ones(6, 3, 4)
    whole = dropout(x, 0.5, KEYS, "here")
    parts = []
    for rank in range(2):
        build = Builder(PlacementTable(), region=TensorRegion(rank, 2))
        parts.append(Dropout(build, 0.5, "here", batch_dim=1, shared_dim=dim)(x.chunk(2, dim)[rank], KEYS))
    assert torch.equal(torch.cat(parts, dim), whole)


def test_a_row_has_the_same_mask_in_any_micro_batch() -> None:
    x = torch.ones(5, 3, 7)
    whole = dropout(x, 0.5, KEYS, "here")
    parts = [dropout(x[:, i : i + 1], 0.5, DropoutKeys(1, 2, (10 + i,)), "here") for i in range(3)]
    assert torch.equal(whole, torch.cat(parts, 1))
    assert torch.equal(whole.transpose(0, 1), dropout(x.transpose(0, 1), 0.5, KEYS, "here", batch_dim=0))


@pytest.mark.parametrize(
    "other", [DropoutKeys(2, 2, (10, 11, 12)), DropoutKeys(1, 3, (10, 11, 12)), DropoutKeys(1, 2, (9, 8, 7))]
)
def test_every_key_matters(other: DropoutKeys) -> None:
    x = torch.ones(50, 3, 7)
    base = dropout(x, 0.5, KEYS, "here")
    assert not torch.equal(base, dropout(x, 0.5, other, "here"))
    assert not torch.equal(base, dropout(x, 0.5, KEYS, "there"))
    assert not torch.equal(base[:, 0], base[:, 1])


def test_share_and_scale() -> None:
    y = dropout(torch.ones(1000, 3, 100), 0.1, KEYS, "here")
    assert float((y == 0).float().mean()) == pytest.approx(0.1, abs=0.003)  # 5 standard errors
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.9)]


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(4, 3, 2)
    assert dropout(x, 0.5, None, "here") is x
    assert dropout(x, 0.0, KEYS, "here") is x
