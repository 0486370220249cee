"""Initial weights are a function of (seed, name, index) alone."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pangu.layers import initial
from pangu.layers.initial import TILE, fill
from pangu.topology.placement import Placement


def initial_rows(placement: Placement, seed: int, start: int, stop: int) -> torch.Tensor:
    """Whole rows of a matrix."""
    rows = torch.empty(stop - start, placement.shape[1])
    fill(rows, placement, seed, (start, 0))
    return rows


def matrix(rows: int, columns: int, name: str = "m") -> Placement:
    return Placement(name, (rows, columns), 0.02)


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_any_block_equals_that_of_the_whole(rows: int, columns: int, data: st.DataObject) -> None:
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
    whole = initial_rows(matrix(rows, columns), 7, 0, rows)
    block = torch.empty(bottom - top, right - left)
    fill(block, matrix(rows, columns), 7, (top, left))
    assert torch.equal(block, whole[top:bottom, left:right])


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_tensors_size_does_not_change_its_numbers(rows: int, columns: int) -> None:
    """So a padded vocabulary or a wider model starts from the same corner."""
    large = initial_rows(matrix(300, 300), 7, 0, 300)
    assert torch.equal(initial_rows(matrix(rows, columns), 7, 0, rows), large[:rows, :columns])


def test_seed_name_and_tile_all_matter() -> None:
    base = initial_rows(matrix(2 * TILE, 2 * TILE), 7, 0, 2 * TILE)
    assert not torch.equal(base, initial_rows(matrix(2 * TILE, 2 * TILE), 8, 0, 2 * TILE))
    assert not torch.equal(base, initial_rows(matrix(2 * TILE, 2 * TILE, "n"), 7, 0, 2 * TILE))
    tiles = [tile for half in base.chunk(2) for tile in half.chunk(2, dim=1)]
    assert not any(torch.equal(tiles[i], tiles[j]) for i in range(4) for j in range(i))


def test_distribution() -> None:
    values = initial_rows(matrix(1000, 1000), 1, 0, 1000)
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-4)  # 5 standard errors of 2e-5
    assert float(values.std()) == pytest.approx(0.02, rel=5e-3)
    assert float(values.pow(4).mean()) / 0.02**4 == pytest.approx(3.0, rel=0.02)  # a normal's kurtosis


def test_bands_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's tensor is filled band by band; three threads share the tiles. Neither begins at a tile's first row."""
    placement = matrix(5 * TILE, 2 * TILE + 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = initial_rows(placement, 7, 100, 5 * TILE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(initial, "BAND", 2 * TILE * placement.shape[1])
    bands: list[int] = []
    draw = initial.draw
    monkeypatch.setattr(initial, "draw", lambda values, *at: (bands.append(len(values)), draw(values, *at)))
    for dtype in (torch.bfloat16, torch.float64):
        filled = torch.empty(alone.shape, dtype=dtype)
        fill(filled, placement, 7, (100, 0))
        assert torch.equal(filled, alone.to(dtype))
    assert bands == [2 * TILE - 100, 2 * TILE, TILE] * 2


def test_constants() -> None:
    gain = Placement("gain", (5,), constant=1.0)
    filled = torch.zeros(5)
    fill(filled, gain, 7)
    assert torch.equal(filled, torch.ones(5))


def test_the_numbers_stay_what_they_are() -> None:
    """A change here changes every run that anybody wants to repeat."""
    values = initial_rows(matrix(130, 140), 1234, 0, 130).numpy()
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == "f8baedfb1cc7da59"
