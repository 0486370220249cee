"""Steps of published systems against their papers, and against simulated schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from benchmarks.planner_accuracy.measurements import CLUSTERS
from benchmarks.planner_accuracy.published import (
    DECODER,
    SYSTEMS,
    Setup,
    System,
    embedding_work,
    head_work,
    kept_bytes,
    layer_work,
)
from benchmarks.planner_accuracy.step import describe, in_flight, makespan, memory_gib, pass_time, step_seconds
from pangu.models.size import num_parameters
from pangu.planning.cost import collective_seconds
from pangu.planning.program import LAYOUT, Plan
from pangu.schedule.actions import Durations
from pangu.schedule.groups import groups_of
from pangu.schedule.schedule import make_schedule
from pangu.schedule.simulate import simulate
from pangu.schedule.spans import Collective
from pangu.topology.layout import Layout

DEEPSPEED = SYSTEMS["deepspeed bf16"]
FSDP = SYSTEMS["fully sharded"]
MEGATRON_2021 = SYSTEMS["megatron of 2021"]
MEGATRON_2022 = SYSTEMS["megatron of 2022"]
MEGATRON_CORE = SYSTEMS["megatron-core"]
NANOTRON = SYSTEMS["nanotron"]
NEMO = SYSTEMS["nemo"]
ONEFLOW = SYSTEMS["oneflow"]
A100 = CLUSTERS["a100"]
GPT_22B = replace(DECODER, layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048)


def setup(
    layout: Layout,
    system: System = MEGATRON_2022,
    recompute: Literal["none", "selective", "full"] = "none",
    micros: int = 1,
    schedule: str = "1f1b",
) -> Setup:
    """The model of 22B with an even number of layers in each chunk."""
    degrees, chunks = {name: getattr(layout, name) for name in LAYOUT}, layout.pipeline * layout.virtual_stages
    batch = {"recompute": recompute, "micro_size": 4, "micro_batches": micros, "schedule": schedule}
    return Setup(GPT_22B, system, Plan(**degrees, **batch, layers=(48 // chunks,) * chunks))


def test_layers_take_as_long_as_was_published() -> None:
    # Korthikanti et al. 2022, table 4: a layer of the 22B model, milliseconds
    def milliseconds(sequence: bool, recompute: Literal["none", "full"]) -> tuple[float, float]:
        one = setup(Layout(8, sequence=sequence), recompute=recompute)
        groups = groups_of(one.plan.layout, 8)
        forward, *backward = (1e3 * pass_time(work, one.system, groups, A100).total for work in layer_work(one).passes)
        return forward, sum(backward)

    assert milliseconds(False, "none") == pytest.approx((7.7, 11.9), rel=0.1)
    assert milliseconds(True, "none") == pytest.approx((7.2, 11.8), rel=0.1)
    assert milliseconds(False, "full") == pytest.approx((7.7, 19.5), rel=0.1)


def test_rings_hold_the_host_where_a_pipeline_crosses_nodes() -> None:
    def computing(system: System, stages: int) -> float:
        one = setup(Layout(8, stages, sequence=True), system)
        return pass_time(layer_work(one).passes[0], system, groups_of(one.plan.layout, 8), A100).compute

    launches = layer_work(setup(Layout(8, 2, sequence=True), NANOTRON)).passes[0].launches
    held = launches * A100.launch_us + 4 * 7 * NANOTRON.contended_us
    assert computing(NANOTRON, 2) == pytest.approx(1e-6 * held)
    assert computing(NANOTRON, 1) < computing(NANOTRON, 2)
    assert computing(MEGATRON_2022, 1) == computing(MEGATRON_2022, 2)


def test_eager_layers_that_compute_less_than_the_host_dispatches_take_as_long_as_the_host() -> None:
    def seconds(hidden: int, recompute: Literal["none", "full"], operator_us: float) -> float:
        one = setup(Layout(8), MEGATRON_2021, recompute)
        model = replace(GPT_22B, hidden=hidden, ffn=4 * hidden, heads=8, sequence=512)
        return step_seconds(one._replace(model=model), replace(A100, operator_us=operator_us))

    # 48 layers dispatch 63 operators forward, as many again to recompute, twice as many backward
    for recompute, passes in (("none", 3), ("full", 4)):
        more = seconds(1024, recompute, 200.0) - seconds(1024, recompute, 100.0)
        assert more == pytest.approx(48 * 63 * passes * 100e-6)
    assert seconds(12288, "full", 10.3) == seconds(12288, "full", 0.0)  # wide layers hide the host


def test_selective_recompute_with_flash_attention_repeats_every_other_matmul() -> None:
    forward, again, *_ = layer_work(setup(Layout(), FSDP, "selective")).passes
    flops = sum(matmul.flops for matmul in forward.matmuls if not matmul.fused)
    assert sum(matmul.flops for matmul in again.matmuls) == pytest.approx(flops / 2)


def test_memory_is_what_the_papers_formulas_say() -> None:
    # 2 + 4 + 12 bytes a parameter in bf16, 2 more in fp16 and where gradients in 16 bits stay, all on one device
    for system, each in ((MEGATRON_2021, 20), (MEGATRON_2022, 18), (NANOTRON, 20)):
        assert describe(setup(Layout(8), system)).states == pytest.approx(each * num_parameters(GPT_22B) / 8, rel=0.02)
    # 34 sbh + 5 a s^2 b a layer over 8 ranks (Korthikanti et al. 2022, table 2)
    s, b, h, a = 2048, 4, 6144, 64
    layer = s * b * h * (10 + 24 / 8 + 5 * a * s / (h * 8))
    assert layer_work(setup(Layout(8))).saved_bytes == pytest.approx(layer)
    # Rajbhandari et al. 2020, 3.1: what is sharded
    for zero, each in ((0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)):
        states = describe(setup(Layout(data=4, zero=zero))).states
        assert states == pytest.approx(each * num_parameters(GPT_22B), rel=0.02)


def test_gradients_are_sent_as_often_as_they_are_whole() -> None:
    def sent(zero: int, schedule: str = "1f1b", stages: int = 1, system: System = MEGATRON_2022) -> dict[str, float]:
        layout = Layout(pipeline=stages, data=4, zero=zero)
        (reductions, _, gathers), *_ = describe(setup(layout, system, micros=8, schedule=schedule)).ends
        collectives = (*reductions.collectives, *gathers.collectives)
        return {one.kind: one.calls for one in collectives if one.axis != "ends"}

    assert sent(0) == {"all_reduce": 1}
    assert sent(1) == {"reduce_scatter": 1, "all_gather": 1}
    assert sent(2) == {"reduce_scatter": 8, "all_gather": 1}
    assert sent(2, "zb-1p") == {"reduce_scatter": 1, "all_gather": 1}
    assert sent(2, stages=2) == {"reduce_scatter": 1, "all_gather": 1}
    assert sent(1, system=DEEPSPEED) == {"all_reduce": 1, "all_gather": 1}  # its `_bf16_reduce_grads`
    assert sent(3) == {}
    _, _, _, weights = layer_work(setup(Layout(data=4, zero=3))).passes
    assert [one.kind for one in weights.collectives] == ["reduce_scatter"]


def test_the_last_bucket_of_gradients_overlaps_nothing() -> None:
    # Megatron-Core: max(40,000,000, 1,000,000 * replicas) parameters
    def sent(tensor: int, data: int) -> tuple[float, float, float]:
        (reductions, _, gathers), *_ = describe(setup(Layout(tensor, data=data, zero=1), MEGATRON_CORE)).ends
        (reduced, *_), (gathered,) = reductions.collectives, gathers.collectives
        assert (gathered.calls, gathered.hidden) == (reduced.calls, reduced.hidden)
        return reduced.bytes / 4, reduced.calls, reduced.hidden

    for data, size in (8, 40e6), (128, 128e6):
        elements, calls, hidden = sent(1, data)
        assert elements == pytest.approx(size)
        assert elements * calls == pytest.approx(num_parameters(GPT_22B), rel=0.02)
        assert hidden == pytest.approx(1 - 1 / calls)
    assert sent(8, 4096)[1:] == (1, 0)


def test_gradients_of_a_chunk_are_sent_beside_the_backward_passes_of_the_others() -> None:
    slow = replace(A100, between=replace(A100.between, gb_s=1.0))

    def exposed(virtual_stages: int) -> float:  # messages between stages are hidden
        layout = Layout(8, 4, 4, 1, virtual_stages=virtual_stages)
        schedule = "interleaved" if virtual_stages > 1 else "1f1b"
        one = setup(layout, MEGATRON_CORE, micros=16, schedule=schedule)
        return step_seconds(one, slow) - step_seconds(one, A100)

    assert 0 < exposed(4) < exposed(1)


@pytest.mark.parametrize(("chunks", "messages"), [(1, 3), (3, 3 + 2 * 4)])
@pytest.mark.parametrize("micros", [16, 32])
def test_hidden_messages_are_exposed_while_a_pipeline_fills_and_drains(chunks: int, messages: int, micros: int) -> None:
    # Narayanan et al. 2021, section 2.2: to the last stage, then a round of all stages for each further chunk
    one = setup(
        Layout(8, 4, virtual_stages=chunks), MEGATRON_CORE, "none", micros, "interleaved" if chunks > 1 else "1f1b"
    )
    groups, slow = groups_of(one.plan.layout, 8), replace(A100, between=replace(A100.between, latency_us=1e6))
    later = step_seconds(one, slow) - step_seconds(one, A100)
    tied = 2 * (1e6 - A100.between.latency_us) * 1e-6  # the all-reduce of the embedding's gradients, once a step
    assert groups["ends"].size == 2
    assert later - tied == pytest.approx(2 * messages * (1 - A100.between.latency_us * 1e-6), rel=1e-3)


def test_weight_gradients_hide_what_input_gradients_send() -> None:
    one = setup(Layout(8))
    fast, slow = (replace(A100, inside=replace(A100.inside, gb_s=gb_s), overlap=1.0) for gb_s in (1e9, 38.0))
    groups = groups_of(one.plan.layout, 8)
    sums = Collective("all_reduce", "tensor", 2.0 * 4 * 2048 * 6144)
    seconds = collective_seconds(sums, groups["tensor"], slow) - collective_seconds(sums, groups["tensor"], fast)
    assert 2 * seconds > pass_time(layer_work(one).passes[2], one.system, groups, slow).compute, (
        "too long for them alone"
    )
    # what is exposed are the sums of the forward pass: of the embedding, and two of each layer
    assert step_seconds(one, slow) - step_seconds(one, fast) == pytest.approx((1 + 2 * 48) * seconds, rel=1e-3)


def test_heads_and_attention_compute_in_16_bits_in_fp8_runs() -> None:
    alone = setup(Layout(8, sequence=True), MEGATRON_CORE)
    fp8 = alone._replace(fp8=True)
    for plain, faster in zip(layer_work(alone).passes, layer_work(fp8).passes, strict=True):
        assert [one.fp8 for one in faster.matmuls] == [not one.fused for one in plain.matmuls]
        assert faster.bytes >= plain.bytes, "operands are cast"
    assert head_work(fp8) == head_work(alone)


def test_scales_of_the_tensor_itself_read_every_operand_once_more() -> None:
    casts, rescales = (
        layer_work(setup(Layout(data=8), FSDP._replace(rescales=rescales))._replace(fp8=True)).passes
        for rescales in (False, True)
    )
    tokens, h = 4 * 2048, 6144
    assert rescales[0].bytes - casts[0].bytes == 2 * tokens * (h + h + h + 4 * h)  # inputs of the four matmuls
    assert rescales[2].bytes - casts[2].bytes == 2 * tokens * (3 * h + h + 4 * h + h)  # gradients of their outputs


def test_heads_reduce_the_loss_and_the_gradients_of_their_inputs() -> None:
    # Shoeybi et al. 2019, section 3: an all-reduce of hidden states backward, three of a number per token for the loss
    tokens, h = 4 * 2048, 6144
    whole = (MEGATRON_2021, 1, 0.0), (MEGATRON_2022, 1, 1.0), (NANOTRON, 1, 1.0)
    for system, stages, hidden in (*whole, (NEMO, 1, 0.5), (NEMO, 4, 0.0)):
        forward, _, backward, _ = head_work(setup(Layout(8, stages), system)).passes
        assert forward.collectives == (Collective("all_reduce", "tensor", 4 * tokens, 3),)
        assert backward.collectives == (Collective("all_reduce", "tensor", 2 * tokens * h, 1, hidden),)


@pytest.mark.parametrize("stages", [1, 4])
def test_weight_gradients_of_the_head_wait_for_a_draining_pipeline(stages: int) -> None:
    waiting = setup(Layout(8, stages), NEMO, micros=16)
    at_once = waiting._replace(system=NEMO._replace(deferred_head=False))
    saved = step_seconds(at_once, A100) - step_seconds(waiting, A100)
    head = pass_time(head_work(waiting).passes[3], NEMO, groups_of(waiting.plan.layout, 8), A100).total
    assert 0 <= saved <= 16 * head
    assert (saved > head) == (stages > 1)


def test_a_chunk_may_have_no_layer() -> None:
    def with_layers(stages: int, layers: tuple[int, ...]) -> Setup:
        one = setup(Layout(pipeline=stages))
        return one._replace(plan=one.plan._replace(layers=layers))

    first, last = describe(with_layers(2, (0, 48))).states
    assert 0 < first < last
    first, middle, last = describe(with_layers(3, (48, 0, 0))).states
    assert middle == 0 < last < first


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize(("stages", "micros"), [(1, 4), (2, 8), (4, 16), (4, 1)])
def test_closed_forms_are_what_the_simulator_finds(
    schedule: str, virtual_stages: int, stages: int, micros: int
) -> None:
    one = setup(Layout(pipeline=stages, virtual_stages=virtual_stages), micros=micros, schedule=schedule)
    exact = simulate(make_schedule(schedule, stages, virtual_stages, micros), Durations())
    assert makespan(
        np.full((stages, 4), [virtual_stages, 0, virtual_stages, virtual_stages]), one, 0.0
    ) == pytest.approx(exact.makespan)
    held = in_flight(stages, virtual_stages, micros, False)
    assert [moments.sum(1).max() for moments in held] == pytest.approx(exact.schedule.peak_live())


def test_zero_bubble_schedules_are_as_long_as_the_paper_says() -> None:
    # Qi et al. 2024, tables 2 and 5: idle (p-1)(F + I - W) with the memory of 1F1B, at most 0.4 % with twice that
    for schedule, idle, waits in (("zb-1p", 3 * (2 + 3 - 1), 16 * 2 * 0.1), ("zb-2p", 0, 0)):
        one = setup(Layout(pipeline=4), micros=16, schedule=schedule)
        assert makespan(np.full((4, 4), [2, 0, 3, 1]), one, 0.1) == pytest.approx(16 * 6 + idle + waits + 2 * 3 * 0.1)
    for is_doubled in (False, True):
        held = in_flight(4, 1, 16, is_doubled)
        assert [int(moments.max()) for moments in held] == [(1 + is_doubled) * left for left in (4, 3, 2, 1)]


@pytest.mark.parametrize(("system", "schedule"), [(ONEFLOW, "1f1b"), (MEGATRON_2022, "zb-2p")])
def test_some_programs_hold_twice_as_many_micro_batches(system: System, schedule: str) -> None:
    one, plain = setup(Layout(8, 4), system, "none", 16, schedule), setup(Layout(8, 4), MEGATRON_2022, "none", 16)
    first, other = describe(one).activations[0], describe(plain).activations[0]
    assert first - other == pytest.approx(4 * 12 * layer_work(one).saved_bytes, rel=0.01)


def test_a_layer_keeps_everything_while_it_is_recomputed_and_the_head_nothing() -> None:
    # Narayanan et al. 2021, section 3.5: inputs of all layers, and what one layer keeps
    one = setup(Layout(8, 2), recompute="full", micros=16)
    inputs, whole = (kept_bytes(one, recompute) for recompute in ("full", "none"))
    messages = 4 * describe(one).message.bytes
    first, last = describe(one).activations - messages
    assert first == pytest.approx(2 * (24 * inputs + embedding_work(one).saved_bytes) + whole)
    assert last == pytest.approx(24 * inputs + max(whole, head_work(one).saved_bytes))


def test_pytorchs_checkpoint_does_not_repeat_the_last_matmul() -> None:
    def repeated(system: System) -> list[tuple[float, float]]:
        return [(one.depth, one.columns) for one in layer_work(setup(Layout(), system, "full")).passes[1].matmuls]

    assert repeated(FSDP._replace(stops_early=False)) == [*repeated(FSDP)[:3], (4 * 6144, 6144), *repeated(FSDP)[3:]]


def test_rotary_positions_move_queries_and_keys_unless_all_is_fused() -> None:
    model = replace(GPT_22B, positions="rope")
    for system, moved in ((FSDP, 10), (FSDP._replace(fused=True), 0), (MEGATRON_CORE, 0)):
        learned, rotated = (layer_work(setup(Layout(), system)._replace(model=one)).passes for one in (GPT_22B, model))
        for index in (0, 2):  # 4 sequences of 2,048 tokens, 2 bytes an element, both queries and keys
            assert rotated[index].bytes - learned[index].bytes == pytest.approx(moved * 4 * 2048 * 2 * 2 * 6144)


def test_rotary_positions_have_no_table() -> None:
    one = setup(Layout())
    rotary = one._replace(model=replace(GPT_22B, positions="rope"))
    assert embedding_work(one).parameters - embedding_work(rotary).parameters == 2048 * 6144


def test_a_step_is_longer_on_a_slower_cluster_and_memory_holds_what_it_must() -> None:
    one = setup(Layout(8, 2, 4, 1), MEGATRON_2021, "full", 16)
    seconds, doubled = step_seconds(one, A100), step_seconds(one, A100, 2.0)
    assert seconds < doubled < 2 * seconds
    assert memory_gib(one, A100) > describe(one).states.max() / 2**30 + A100.memory.context_gib
