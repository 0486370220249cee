"""Bytes that a rank keeps and sends are those of the plan, which are those of the ZeRO paper with padding."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.pipeline.stages import plan_stages
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.zero.states import StatePlan, held_bytes, peak_states, plan_states
from pangu.zero.unshard import Unsharder
from tests.collective_counter import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, counted
from tests.configs import tiny
from tests.parallel.harness import RaggedStream, parallel_keys
from tests.threads import Ranks

EXPERTS = ("model.experts=4", "batch.global_size=8")
SMALL = ("model.attention=reference", "batch.micro_size=1", "parallel.bucket_mib=null")


class Gathered:
    """Most bytes of weights that are whole or on their way at a time at stage 3, and those of all gathers."""

    def __init__(self, weights: Unsharder) -> None:
        self.most, self.total = 0, 0
        self.weights = weights
        for unit in weights.flat_parameters:
            unit.allocate = self.watching(unit.allocate)

    def watching(self, hold: Any) -> Any:
        """`hold`, and a look around."""

        def held() -> Any:
            whole = hold()
            now = sum(unit.weights.untyped_storage().nbytes() for unit in self.weights.flat_parameters)
            self.most = max(self.most, now)
            self.total += whole.nbytes
            return whole

        return held


def plan_of(config: RunConfig, layout: Layout, rank: int) -> StatePlan:
    return plan_states(config, layout, rank, plan_stages(config, layout).of(layout.coordinates(rank).pipeline))


def measure(rank: int, world: int, layout: Layout, *overrides: str) -> dict[str, Any]:
    """Bytes kept, at once and sent by a rank, beside those of the plan; the second of two steps is counted."""
    config = tiny(*SMALL, *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    watched = Gathered(trainer.parameters.unsharder)
    at, size = trainer.mesh.at, config.batch.global_size
    with Loader(RaggedStream(), config.data.packing, size, config.batch.micro_size, at.data, layout.data) as loader:
        batches = loader.micro_batches(0)
    trainer.train_step(batches)
    watched.total = 0
    counts: Any = counted() if layout.pipeline == 1 else nullcontext({})
    with counts as totals:
        trainer.train_step(batches)
    return {
        "plan": plan_of(config, layout, rank),
        "held": held_bytes(trainer.parameters.flat_parameters, trainer.optimizer),
        "gathered": watched.most,
        "gathers": watched.total,
        "sent": {kind: traffic.bytes for kind, traffic in totals.items()},
        "numel": sum(unit.numel for unit in trainer.parameters.flat_parameters),
    }


@pytest.mark.parametrize("kind", ["pangu", "gpt"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("data", [2, 4])
def test_plan_and_buffers_agree_to_the_byte(ranks: Ranks, data: int, zero: int, accumulation: int, kind: str) -> None:
    overrides = (f"model.kind={kind}", f"batch.global_size={data * accumulation}", "precision=bf16")
    layout = Layout(data=data, zero=zero)
    for found in ranks.run(data, measure, layout, *overrides):
        plan: StatePlan = found["plan"]
        assert found["held"] == plan.bytes
        # the table of ZeRO's paper, in bf16 with fp32 gradients; padding is less than a tenth of so small a model
        shard = [data if zero >= stage else 1 for stage in (1, 2, 3)]
        paper = found["numel"] * (2 / shard[2] + 4 / shard[1] + 12 / shard[0])
        assert 0.97 * paper < sum(plan.bytes.values()) < 1.1 * paper
        # sent: reduce-scatter and gather cost one each, of 4 and 2 bytes
        each, sent = found["numel"], found["sent"]
        if zero == 0:
            # of more ranks the sum is a reduce-scatter and a gather on gloo
            assert data > 2 or sent[ALL_REDUCE] == pytest.approx(4 * each, rel=0.1)
            continue
        assert sent[REDUCE_SCATTER] == pytest.approx(4 * each * (accumulation if zero >= 2 else 1), rel=0.1)
        if zero in (1, 2):
            assert sent[ALL_GATHER] == pytest.approx(2 * each, rel=0.1)
        if zero == 3:
            # at most twice: tables and the head are not gathered for backward again
            assert 2 * each < sent[ALL_GATHER] / accumulation < 2 * 2 * 1.1 * each
            assert found["gathered"] < 2 * each  # never the whole model


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(data=2, zero=1), ("memory.offload=[optimizer]",)),
        (Layout(data=2, zero=3), ("memory.offload=[optimizer,parameters]", "optimizer.moments=bf16")),
        (Layout(data=2, zero=3), ("memory.offload=[parameters]", "precision=fp32")),
        (Layout(data=2, zero=2), ("train.frozen=[layers.1.*]", "precision.reduce=bf16")),
        (Layout(data=2, zero=3), ("train.frozen=[embedding.*,layers.0.*]",)),
        (Layout(pipeline=2, data=2, zero=3), ("parallel.schedule=1f1b",)),
        (Layout(pipeline=3, data=2, zero=3), ("parallel.schedule=1f1b", "model.layers=3")),  # one layer on each stage
        (Layout(pipeline=2, virtual_stages=2, data=2, zero=3), ("parallel.schedule=breadth_first", "model.layers=4")),
        (
            Layout(pipeline=2, virtual_stages=2, data=2, zero=3),
            ("parallel.schedule=interleaved", "model.layers=8", "model.positions=relative"),
        ),
        (Layout(pipeline=2, data=2, zero=2), ("parallel.layers=[1,2]", "train.frozen=[embedding.*,layers.0.*]")),
        (Layout(data=2, zero=3), ("model.final_norm=after_query", "model.tied_head=false")),
        (Layout(tensor=2, data=2, zero=2), ()),
        (Layout(data=4, zero=3, expert=2), EXPERTS),
        (Layout(data=2, zero=3, expert=2), ("memory.offload=[optimizer]", *EXPERTS)),
        (Layout(data=4, zero=2, zero_group=2, expert=2), EXPERTS),
        (Layout(tensor=2, data=2, zero=1, expert_tensor=1), EXPERTS),
        (Layout(pipeline=2, data=2, zero=3, expert=2), ("parallel.schedule=1f1b", "model.dense_layers=1", *EXPERTS)),
    ],
    ids=str,
)
def test_plan_and_buffers_agree_with_options(ranks: Ranks, layout: Layout, overrides: tuple[str, ...]) -> None:
    chosen = ("batch.global_size=4", "precision=bf16", *overrides)
    for found in ranks.run(layout.world, measure, layout, *chosen):
        plan: StatePlan = found["plan"]
        assert found["held"] == plan.bytes
        if layout.zero == 3 and layout.pipeline == 1:
            assert found["gathers"] == found["sent"][ALL_GATHER]


def test_gpipe_gathers_parameters_at_most_twice_a_step(ranks: Ranks) -> None:
    """However many micro-batches there are; padding is less than a tenth of so small a model."""
    chosen = ("batch.global_size=8", "precision=bf16", "parallel.schedule=gpipe")
    for found in ranks.run(2, measure, Layout(data=2, zero=3), *chosen):
        assert found["sent"][ALL_GATHER] <= 2 * 1.1 * 2 * found["numel"]


def test_what_the_log_says() -> None:
    config = tiny("precision=bf16", "parallel.zero=3", "parallel.data=4")
    words = plan_of(config, Layout(data=4, zero=3), 0).words()
    parts = ("parameters 20.9 KiB", "gradients 41.8 KiB", "master weights 41.8 KiB", "moments 83.5 KiB")
    assert all(part in words for part in parts)
    assert words.startswith("0.2 MiB: ")


def test_a_rank_that_shares_with_nobody_keeps_its_gradients() -> None:
    config = tiny("memory.offload=[parameters]")
    alone, plain = (plan_of(config, Layout(zero=3), 0), plan_of(tiny(), Layout(), 0))
    assert alone.bytes["gradients"] == plain.bytes["gradients"]


def test_the_fullest_stage_may_be_any_with_experts() -> None:
    """Of the eight stages of two layers the second, the fourth and the sixth have some."""
    config = tiny("model.experts=8", "model.layers=16", "model.expert_every=4", "parallel.pipeline=8")
    layout = Layout(pipeline=8)
    each = [sum(plan_of(config, layout, rank).bytes.values()) for rank in range(8)]
    assert max(each) == each[1] == each[5] > each[6]
    assert sum(peak_states(config, layout, plan_stages(config, layout).of).bytes.values()) == max(each)
