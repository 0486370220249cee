"""ALiBi's slopes and T5's buckets against values worked out by hand and against the released function."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from pangu.collectives.regions import TensorRegion
from pangu.layers.biases import Alibi, RelativeBias, alibi_slopes, relative_bucket
from pangu.layers.builder import Builder
from pangu.topology.placement import Placement, PlacementTable, TensorRank

CPU = torch.device("cpu")


def test_slopes_of_8_heads_are_the_papers() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_slopes_of_head_counts_that_are_no_power_of_two() -> None:
    """The released code: those of the next lower power, then every other one of twice that power."""
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi_by_hand() -> None:
    alibi = Alibi(Builder(PlacementTable()), 2)
    bias = alibi(3, torch.float64, CPU)
    assert alibi(3, torch.float64, CPU) is bias
    assert alibi(3, torch.float32, CPU).by_distance.dtype == torch.float32
    steep, flat = 2**-4, 2**-8
    assert bias.by_distance.tolist() == [[0, 0], [-steep, -flat], [-2 * steep, -2 * flat]]
    dense = bias.dense()
    assert dense.shape == (2, 3, 3)
    assert dense[0].tril().tolist() == [[0, 0, 0], [-steep, 0, 0], [-2 * steep, -steep, 0]]
    assert bias.slopes is not None
    assert bias.slopes.dtype == torch.float32


def test_slopes_go_by_the_global_number_of_the_head() -> None:
    for rank in range(3):
        build = Builder(PlacementTable(), region=TensorRegion(rank, 3))
        assert Alibi(build, 6).slopes == alibi_slopes(6)[2 * rank : 2 * rank + 2]


def test_buckets_by_hand() -> None:
    """8 buckets up to 16: 0 to 3 for themselves; then 4 (d / 4)^(1 / log 4) rounded down: a new bucket at every factor
    of 4^(1/4) = 1.41: at 4, 5.66, 8 and 11.3."""
    expected = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7]
    assert relative_bucket(18, 8, 16).tolist() == expected


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (6, 9), (2, 2), (32, 256), (5, 100)])
def test_buckets_are_t5s(buckets: int, furthest: int) -> None:
    theirs = T5Attention._relative_position_bucket(-torch.arange(600), False, buckets, furthest)
    assert torch.equal(relative_bucket(600, buckets, furthest), theirs)


def test_relative_bias_looks_up_the_bucket_of_the_distance() -> None:
    table = PlacementTable()
    table.place("bias.weight", [Placement("bias.weight", (4, 3), 0.1)], TensorRank())
    layer = RelativeBias(Builder(table), "bias", 8)
    layer.weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    dense = layer(5, torch.float32, CPU).dense()
    buckets = [0, 1, 2, 2, 3]
    for query in range(5):
        for key in range(query + 1):
            assert dense[:, query, key].tolist() == layer.weight[buckets[query - key]].tolist()
    dense.tril().sum().backward()
    # pairs of tokens at each distance of a bucket
    assert layer.weight.grad is not None
    assert layer.weight.grad[:, 0].tolist() == [5, 4, 3 + 2, 1]
