"""Replicas, accumulation and micro-batch size do not change the maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.layout import Layout
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
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


EXPERTS = ("model.experts=6", "model.expert_ffn=12", "model.router.z_loss=0.01", "data.packing.pad=null")
UNEVEN = {
    "zero 0": (Layout(data=3), (), ()),
    "zero 1, LAMB": (Layout(data=3, zero=1), ("optimizer=lamb",), ("memory.recompute=full",)),
    "zero 2 in groups": (Layout(data=6, zero=2, zero_group=3), ("batch.global_size=10",), ()),
    "zero 3": (Layout(data=3, zero=3), (), ()),
    "tensor": (Layout(tensor=2, data=3, sequence=True, zero=2), ("optimizer=muon", "optimizer.qk_clip=0.1"), ()),
    "pipeline": (Layout(pipeline=2, data=3, zero=2), ("model.mtp_layers=1",), ("parallel.schedule=zb_h1",)),
    "interleaved": (
        Layout(pipeline=2, virtual_stages=2, data=3, zero=3),
        ("model.layers=4",),
        ("parallel.schedule=interleaved",),
    ),
    "context": (Layout(context=2, data=3, zero=1), ("precision.matmul=fp8",), ()),
    "experts": (Layout(data=3, expert=3, zero=3), (*EXPERTS, "model.expert_capacity=0.8"), ()),
    "experts, fixed": (
        Layout(data=3, expert=3, zero=1),
        (*EXPERTS, "model.expert_capacity=0.8", "model.router.balance=bias"),
        ("parallel.fixed_exchange=true",),
    ),
    "experts, fixed, tokens without padding": (
        Layout(data=3, expert=3),
        (*EXPERTS[:3], "model.router.balance=global"),
        ("parallel.fixed_exchange=true",),
    ),
    "experts of a global balance": (
        Layout(tensor=2, data=3, expert=6, expert_tensor=1),
        (*EXPERTS, "model.router.balance=global", "model.kind=gpt"),
        (),
    ),
}
"""Layout, what one process is told too, and what only the layout is told: 8 sequences for 3 replicas."""


@pytest.mark.parametrize("name", UNEVEN)
def test_replicas_with_fewer_samples_than_others_give_the_same_run_in_float64(ranks: Ranks, name: str) -> None:
    """2 steps, 1e-12 as everywhere: the third replica has one micro-batch less than the others."""
    layout, model, own = UNEVEN[name]
    model = (*OVERRIDES, "precision=fp64", "batch.micro_size=1", "model.hidden=24", "model.layers=3", *model)
    one = one_process(2, *model)
    compare(ranks.run(layout.world, train_layout, layout, 2, *model, *own)[0], one, 1e-12)


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
