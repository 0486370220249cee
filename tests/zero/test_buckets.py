"""How many layers a message between replicas holds."""

from __future__ import annotations

import math

import pytest

from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.topology.placement import TensorRank
from pangu.zero.grouping import divide
from tests.configs import config

LAYER = 12_596_224 / 2**18
"""MiB of fp32 gradients of a layer of 350M."""


def sizes(zero: int, replicas: int, *overrides: str) -> list[float]:
    """MiB of each bucket of 350M's fp32 gradients, in the order of forward."""
    run = config("+config=pangu_350m", f"parallel.zero={zero}", *overrides)
    part = ModelPart(range(run.model.layers), first=True, last=True)
    table = place_tensors(run.model, [part], TensorRank(0, 1))
    uses = {0: parameters_by_module(run.model, tuple(table.shapes), part)}
    buckets: list[float] = []

    def add(chunk: int, names: list[str]) -> None:
        buckets.append(sum(math.prod(table.shapes[name]) for name in names) / 2**18)

    divide(table, uses, run.parallel.bucket_bytes(zero, replicas), add)
    return buckets


@pytest.mark.parametrize(("replicas", "layers", "count"), [(2, 1, 25), (12, 1, 25), (16, 2, 13), (64, 6, 5)])
def test_each_replica_gets_a_piece_that_is_worth_a_message(replicas: int, layers: int, count: int) -> None:
    """Small groups send a layer at a time, larger ones as many as it takes to give each replica 4 MiB."""
    buckets = sizes(1, replicas)
    assert len(buckets) == count
    assert buckets[1] == pytest.approx(layers * LAYER)
    assert all(bucket >= 4 * replicas for bucket in buckets[:-1])
    assert sum(buckets) == pytest.approx(sum(sizes(1, 1)))


@pytest.mark.parametrize("zero", [2, 3])
def test_whole_gradients_that_come_and_go_stay_those_of_a_layer(zero: int) -> None:
    """Three buckets of them are there at a time."""
    assert sizes(zero, 1024) == sizes(zero, 2)
    assert sizes(zero, 1024)[1] == pytest.approx(LAYER)


def test_without_sharding_buckets_are_25_mib_at_least() -> None:
    small = ("model.hidden=256",)  # layers of 3 MiB
    assert sizes(0, 1, *small) == sizes(0, 6, *small)
    assert min(sizes(0, 6, *small)[:-1]) >= 25
    assert min(sizes(0, 7, *small)[:-1]) >= 28


def test_what_is_asked_for_counts() -> None:
    assert sizes(1, 1024, "parallel.bucket_mib=100") == sizes(3, 2, "parallel.bucket_mib=100")
    assert min(sizes(1, 1024, "parallel.bucket_mib=100")[1:-1]) >= 100
