"""ZeRO does not change the maths: not a bit of it where the same numbers are added in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, train_layout
from tests.threads import Ranks

MODEL = (*OVERRIDES, "batch.micro_size=1", "batch.global_size=4")
ONE_EACH = (*OVERRIDES, "batch.micro_size=2", "batch.global_size=4")


def same_bits(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Results, gradients and weights are equal bit for bit."""
    assert ours["results"] == other["results"]
    for mine, reference in zip(ours["gradients"], other["gradients"], strict=True):
        assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in other["weights"].items())


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("data", [2, 4])
def test_stages_are_equal_bit_for_bit_in_fp32(ranks: Ranks, data: int, optimizer: str) -> None:
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
        ours = ranks.run(data, train_layout, layout, 2, *overrides, "optimizer.clip=null", *more)[0]
        first = first or ours
        for mine, reference in zip(ours["gradients"], first["gradients"], strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
        assert all(torch.equal(ours["weights"][name], weight) for name, weight in first["weights"].items())
