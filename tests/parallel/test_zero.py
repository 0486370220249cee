"""ZeRO does not change the maths: not a bit of it where the same numbers are added in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.spawn import Pool

MODEL = (*OVERRIDES, "batch.micro_size=1", "batch.global_size=4")
ONE_EACH = (*OVERRIDES, "batch.micro_size=2", "batch.global_size=4")


def same_bits(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Results, gradients and weights are equal bit for bit."""
    assert ours["results"] == other["results"]
    for mine, reference in zip(ours["gradients"], other["gradients"], strict=True):
        assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in other["weights"].items())


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_stage_gives_the_same_run_in_float64(pool: Pool, zero: int, optimizer: str) -> None:
    """3 steps of 2 micro-batches; 1e-12 relative."""
    overrides = (*MODEL, "precision=fp64", f"optimizer={optimizer}")
    one = one_process(3, *overrides)
    compare(pool.run(2, train_layout, Layout(data=2, zero=zero), 3, *overrides)[0], one, 1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("data", [2, 4])
def test_stages_are_equal_bit_for_bit_in_fp32(pool: Pool, data: int, optimizer: str) -> None:
    """With one micro-batch per rank and step; whatever the bucket, overlapped or not. LAMB's norms are sums over shares
    and Adam's clip norm too, in another order: nothing is clipped here, and LAMB is compared between shardings."""
    overrides = (*OVERRIDES, "batch.micro_size=1", f"batch.global_size={data}", f"optimizer={optimizer}")
    first = None
    for zero, more in [
        *([(0, ())] if optimizer == "adam" else []),
        (1, ()),
        (2, ()),
        (3, ()),
        (2, ("parallel.overlap=false",)),
        (3, ("parallel.overlap=false",)),
    ]:
        layout = Layout(data=data, zero=zero)
        ours = pool.run(data, train_layout, layout, 3, *overrides, "optimizer.clip=null", *more)[0]
        first = first or ours
        for mine, reference in zip(ours["gradients"], first["gradients"], strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
        assert all(torch.equal(ours["weights"][name], weight) for name, weight in first["weights"].items())


GRID = [
    # layout, schedule
    (Layout(tensor=2, data=2, zero=1, sequence=True), "1f1b"),
    (Layout(tensor=2, data=2, zero=3), "1f1b"),
    (Layout(pipeline=2, data=2, zero=1), "1f1b"),
    (Layout(pipeline=2, data=2, zero=2), "zb_h1"),
    (Layout(pipeline=2, data=2, zero=3), "1f1b"),
    (Layout(pipeline=2, data=2, zero=3, virtual=2), "breadth_first"),
    (Layout(pipeline=2, data=2, zero=2, virtual=2), "zb_v"),
    (Layout(data=4, zero=2, zero_group=2), "1f1b"),
    (Layout(data=4, zero=3, zero_group=2), "1f1b"),
    (Layout(data=4, zero=3), "gpipe"),
]


@pytest.mark.parametrize(("layout", "schedule"), GRID, ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_combinations_give_the_same_run_in_float64(pool: Pool, layout: Layout, schedule: str, optimizer: str) -> None:
    overrides = (*MODEL, "precision=fp64", "model.layers=5", f"optimizer={optimizer}", "memory.recompute=1")
    one = one_process(3, *overrides)
    ranks = pool.run(layout.world, train_layout, layout, 3, *overrides, f"parallel.schedule={schedule}")
    compare(ranks[0], one, 1e-12)
