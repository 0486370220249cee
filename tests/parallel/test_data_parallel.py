"""Replicas, accumulation and micro-batch size do not change the maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.layout import Layout
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, compare, train_layout
from tests.threads import Ranks

# (processes, sequences in a micro-batch): all see 8 sequences a step, in 1 to 8 micro-batches
LAYOUTS = [(1, 8), (1, 2), (2, 2), (2, 1), (4, 2), (4, 1)]


def train(rank: int, world: int, micro_size: int, steps: int, *overrides: str) -> dict[str, Any]:
    """Train a few steps on `world` replicas."""
    layout = Layout(data=world)
    return train_layout(rank, world, layout, steps, *OVERRIDES, f"batch.micro_size={micro_size}", *overrides)


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_every_split_of_the_batch_gives_the_same_run_in_float64(ranks: Ranks, optimizer: str) -> None:
    """5 steps; 1e-13 relative in the loss: sums of 128 token losses in another order, 1.1e-16 each."""
    overrides = (f"optimizer={optimizer}", "precision=fp64")
    one = train(0, 1, 8, 5, *overrides)
    assert one["units"] > 3
    assert len(LAYOUTS) == 6
    for world, micro_size in LAYOUTS[1:]:
        compare(ranks.run(world, train, micro_size, 5, *overrides)[0], one, 1e-13)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_process_accumulating_4_equals_two_accumulating_2_in_fp32(ranks: Ranks, recompute: str) -> None:
    """5 steps; 1e-6 in the loss (16 roundings of 6e-8) and hence 1e-4 of the largest element in a gradient; weights to
    1e-3 of one unit, because Adam divides small gradients by their own size: compared are the losses of all steps."""
    overrides = (f"memory.recompute={recompute}",)
    one = train(0, 1, 2, 5, *overrides)
    two = ranks.run(2, train, 2, 5, *overrides)[0]
    compare(two, one, 1e-6)


def test_recompute_changes_no_bit() -> None:
    kept, again = train(0, 1, 4, 3), train(0, 1, 4, 3, "memory.recompute=full")
    assert all(torch.equal(kept["weights"][name], again["weights"][name]) for name in kept["weights"])


def test_synthetic_tokens_do_not_depend_on_the_replicas(ranks: Ranks) -> None:
    one = ranks.run(1, tokens_seen, 4)[0]
    split = [row for rank in ranks.run(2, tokens_seen, 2) for row in rank]
    assert len(one) == 16
    assert sorted(map(tuple, one)) == sorted(map(tuple, split))


def tokens_seen(rank: int, world: int, micro_size: int) -> list[list[int]]:
    config = tiny(f"batch.micro_size={micro_size}")
    sources = open_sources(config.data, config.model, config.train.seed)
    with Loader(sources.train, config.data.packing, 8, micro_size, rank, world) as loader:
        return [row for step in range(2) for batch in loader.micro_batches(8 * step) for row in batch.tokens.tolist()]
